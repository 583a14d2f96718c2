"""Checkpoints and resuming: files that survive anything, and runs that go on as if nothing had happened."""

import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dqn_atari
import dqn_atari_jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from ale_py.env import AtariEnv
from ale_py.vector_env import AtariVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cli import GAME, TIMED_TAGS, Scalars, only, read_scalars, run_script, tiny, twin, write_teacher
from test_replay import Game, JaxQDaggerReplay, Play, TorchQDaggerReplay, frame, scripts

from cleanrl_utils import checkpoint, runs
from cleanrl_utils import resume as resuming
from cleanrl_utils.checkpoint import CheckpointStore, DamagedFile, RandomState, pack, read_file, unpack, write_file
from cleanrl_utils.errors import EmulatorFailure, TrainingFailure, UserError, one_line_errors
from cleanrl_utils.evaluation import play_games, play_wrapped_game
from cleanrl_utils.jax_checkpoint import ReplayState as JaxReplayState
from cleanrl_utils.jax_checkpoint import TreeState
from cleanrl_utils.resume import Run, parse_args
from cleanrl_utils.runs import EventWriter
from cleanrl_utils.torch_checkpoint import GlobalRandomState, ModuleState, OptimizerState, ReplayState
from cleanrl_utils.torch_speed import WorkingCopy

REPO = Path(__file__).parent.parent

# ==================== files ====================


class ArrayReplay:
    """The least that a store needs of a replay: rows of two environments that say which they are."""

    def __init__(self, length: int):
        self.length, self.rows_written = length, 0
        self.arrays = {"frame": np.zeros((length, 2, 3), np.uint8), "reward": np.zeros((length, 2), np.float32)}

    def add(self, rows: int) -> None:
        for row in range(self.rows_written, self.rows_written + rows):
            self.arrays["frame"][row % self.length] = [[row % 251, row // 251, 7], [row % 241, 9, 9]]
            self.arrays["reward"][row % self.length] = [row, -row]
        self.rows_written += rows

    def read(self, low: int, high: int) -> dict[str, np.ndarray]:
        return {name: array[low:high] for name, array in self.arrays.items()}

    def write(self, low: int, rows: dict[str, np.ndarray]) -> None:
        for name, array in rows.items():
            self.arrays[name][low : low + len(array)] = array

    def save(self) -> dict[str, int]:
        return {"rows_written": self.rows_written}

    def load(self, state: dict[str, int]) -> None:
        self.rows_written = state["rows_written"]


def state_of(number: int) -> dict[str, Any]:
    """A state that says which one it is."""
    return {"number": number, "weights": np.full(5, number, np.float32), "nested": [{"x": np.array(number)}, None, 0.1]}


def assert_checkpoint(directory: Path, number: int, length: int, rows: int) -> None:
    """The directory's newest whole checkpoint is that of ``number``, with the last ``length`` of ``rows`` rows."""
    store, replay, expected = CheckpointStore(directory), ArrayReplay(length), ArrayReplay(length)
    state = store.load()
    assert state["number"] == number
    np.testing.assert_array_equal(state["weights"], np.full(5, number, np.float32))
    assert state["nested"][0]["x"].shape == ()
    store.load_replay(replay, "replay")
    expected.add(rows)
    assert replay.rows_written == rows
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(replay.arrays[name], array)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 30),
    added=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    reopen=st.lists(st.booleans(), min_size=8, max_size=8),
    segment_bytes=st.sampled_from([40, 100, 10**6]),
)
def test_replay_round_trip(
    length: int, added: list[int], reopen: list[bool], segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However many rows come between two checkpoints, and whoever goes on from them: all rows come back."""
    directory = tmp_path_factory.mktemp("run") / "checkpoint"
    store, replay = CheckpointStore(directory), ArrayReplay(length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SEGMENT_BYTES", segment_bytes)
        for number, rows in enumerate(added):
            replay.add(rows)
            store.save(state_of(number), replay, "replay")
            assert_checkpoint(directory, number, length, replay.rows_written)
            if reopen[number]:
                store, replay = CheckpointStore(directory), ArrayReplay(length)
                store.load()
                store.load_replay(replay, "replay")
    # Nothing is left of what no checkpoint needs: of a ring's rows at most two checkpoints' worth, and their segments.
    assert len(list(directory.glob("*.state"))) == min(len(added), 2)
    assert not list(directory.glob("*.tmp"))


def test_only_new_rows_are_written(tmp_path: Path) -> None:
    """Each row is written once; a replay that was dropped, and rows that were overwritten, leave the disk."""
    store, replay = CheckpointStore(tmp_path / "checkpoint"), ArrayReplay(10)
    files = lambda: {path.name for path in (tmp_path / "checkpoint").glob("*.rows")}  # noqa: E731
    for number, expected in enumerate(
        [
            {"replay-0-4.rows"},
            {"replay-0-4.rows", "replay-4-8.rows"},
            {"replay-0-4.rows", "replay-4-8.rows", "replay-8-10.rows", "replay-10-12.rows"},
            {f"replay-{low}.rows" for low in ("0-4", "4-8", "8-10", "10-12", "12-16")},
            {f"replay-{low}.rows" for low in ("4-8", "8-10", "10-12", "12-16", "16-20")},
        ]
    ):
        replay.add(4)
        store.save(state_of(number), replay, "replay")
        assert files() == expected, number
    other = ArrayReplay(10)
    other.add(3)
    store.save(state_of(5), other, "other")
    assert "other-0-3.rows" in files()
    store.save(state_of(6))
    store.save(state_of(7))
    assert files() == set()
    store.forget()
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["000008.state"]


def make_two(directory: Path) -> None:
    """Two checkpoints, number 1 with 3 rows and number 2 with 5."""
    store, replay = CheckpointStore(directory), ArrayReplay(10)
    for number, rows in ((1, 3), (2, 2)):
        replay.add(rows)
        store.save(state_of(number), replay, "replay")


@pytest.mark.parametrize("name", ["000002.state", "replay-3-5.rows"])
def test_any_damage_is_noticed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A bit flipped in any byte, an end cut off anywhere, something appended: it says so and takes the one before."""
    directory = tmp_path / "checkpoint"
    make_two(directory)
    path = directory / name
    good = path.read_bytes()
    damaged = [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :] for i in range(len(good))]
    damaged += [good[:i] for i in range(len(good))] + [good + b"\0", bytes(len(good)), good + good]
    for data in damaged:
        path.write_bytes(data)
        assert CheckpointStore(directory).load()["number"] == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("WARNING: ")
        assert name in line
    path.unlink()
    assert_checkpoint(directory, 1, 10, 3)
    path.write_bytes(good)
    assert_checkpoint(directory, 2, 10, 5)


def test_going_on_after_damage(tmp_path: Path) -> None:
    """The next checkpoint takes the damaged one's place, and the one that was gone on from is the one before."""
    directory = tmp_path / "checkpoint"
    make_two(directory)
    (directory / "000002.state").write_bytes(b"")
    store, replay = CheckpointStore(directory), ArrayReplay(10)
    store.load()
    store.load_replay(replay, "replay")
    replay.add(2)
    store.save(state_of(3), replay, "replay")
    assert_checkpoint(directory, 3, 10, 5)
    (directory / "000002.state").write_bytes(b"")
    assert_checkpoint(directory, 1, 10, 3)


def test_a_segment_of_another_future(tmp_path: Path) -> None:
    """A whole segment that took the place of a damaged one does not make the checkpoint it belonged to whole again."""
    directory = tmp_path / "checkpoint"
    make_two(directory)
    rows = {"frame": np.ones((2, 2, 3), np.uint8), "reward": np.ones((2, 2), np.float32)}
    write_file(directory / "replay-3-5.rows", list(rows), list(rows.values()))
    assert_checkpoint(directory, 1, 10, 3)


def test_nothing_whole(tmp_path: Path) -> None:
    """Both damaged, none at all: one line each, and what to do."""
    make_two(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "replay-0-3.rows").write_bytes(b"x")
    with pytest.raises(UserError, match=r"replay-0-3\.rows.*anew"):
        CheckpointStore(tmp_path / "checkpoint").load()
    with pytest.raises(UserError, match="no checkpoint"):
        CheckpointStore(tmp_path / "nothing").load()


def test_no_code_is_run(tmp_path: Path) -> None:
    """A pickle in a file whose checksum is right is refused."""

    class Touch:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "trap"),)

    path = tmp_path / "000001.state"
    np.save(path.open("wb"), np.array([Touch()], object), allow_pickle=True)
    for data in (path.read_bytes(), pickle.dumps(Touch())):
        path.write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))
        with pytest.raises(DamagedFile):
            read_file(path)
    assert not (tmp_path / "trap").exists()
    with pytest.raises(ValueError, match="pickle"):
        write_file(path, {}, [np.array([Touch()], object)])


def in_child(function: Callable[[], None]) -> int:
    """Wait status of a forked process that calls ``function``."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Makes the process kill itself before the ``number``-th operation on a file; in the middle of it if it writes."""
    left = number

    def counted(function: Callable, partly: Callable | None = None) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                if partly:
                    partly(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def write_half(summed: Any, data: bytes) -> None:
        summed.file.write(bytes(data)[: len(data) // 2])
        summed.file.flush()

    patch.setattr(checkpoint._Summed, "write", counted(checkpoint._Summed.write, write_half))
    patch.setattr(os, "fsync", counted(os.fsync))
    for name in ("open", "replace", "unlink", "mkdir"):
        patch.setattr(Path, name, counted(getattr(Path, name)))


def test_kill_at_every_operation(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Whichever operation a kill comes before, the checkpoint before is whole, or the new one; saving then goes on."""
    kills, number = 0, 0
    outcomes = set()
    while True:
        directory = tmp_path / f"run{number}" / "checkpoint"
        directory.parent.mkdir()
        make_two(directory)

        def save_third(directory: Path = directory, number: int = number) -> None:
            store, replay = CheckpointStore(directory), ArrayReplay(10)
            store.load()
            store.load_replay(replay, "replay")
            replay.add(9)  # over the end of the ring: two new segments, and one that is no longer needed
            with pytest.MonkeyPatch.context() as patch:
                kill_at(number, patch)
                store.save(state_of(3), replay, "replay")

        status = in_child(save_third)
        store = CheckpointStore(directory)
        found = store.load()["number"]
        outcomes.add(found)
        assert_checkpoint(directory, found, 10, {2: 5, 3: 14}[found])
        replay = ArrayReplay(10)
        store.load_replay(replay, "replay")
        replay.add(1)
        store.save(state_of(4), replay, "replay")
        assert_checkpoint(directory, 4, 10, replay.rows_written)
        assert not list(directory.glob("*.tmp"))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills, number = kills + 1, number + 1
    assert "damaged" not in capfd.readouterr().err, "a file had its name before it was whole"
    assert outcomes == {2, 3}
    assert kills >= 25


def test_tree() -> None:
    """What a state may be made of comes back, but for tuples."""
    tree = {"a": [1, None, True, "x", 1e-300, 2**127], "b": {"c": np.arange(3), "d": {}}, "e": (np.float32(2) * 1.0,)}
    tree["e"] = [np.array(True)]
    arrays: list[np.ndarray] = []
    again = unpack(json.loads(json.dumps(pack(tree, arrays))), arrays)
    np.testing.assert_equal(again, tree)


def test_random_state() -> None:
    """A generator goes on where it was, in another one made from another seed."""
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    first.random(7)
    first.integers(0, 5, 3, np.int32)  # leaves half a draw behind
    RandomState(second).load(json.loads(json.dumps(RandomState(first).save())))
    np.testing.assert_array_equal(first.integers(0, 5, 9, np.int32), second.integers(0, 5, 9, np.int32))


# ==================== a full disk ====================


@pytest.fixture(params=["full", "too large"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A folder on a disk without room until ``free()`` is called: a tiny filesystem, or a limit of file sizes."""
    if request.param == "full":
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting takes root")
        (folder / "filler").write_bytes(bytes(160_000))
        yield SimpleNamespace(folder=folder, free=(folder / "filler").unlink)
        subprocess.run(["umount", str(folder)], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        free = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # noqa: E731
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        yield SimpleNamespace(folder=tmp_path, free=free)
        free()
        signal.signal(signal.SIGXFSZ, handler)


def test_checkpoint_on_a_full_disk(small_disk: SimpleNamespace) -> None:
    """The error is raised, the checkpoint before is whole, nothing half-written is left, and later it works."""
    directory = small_disk.folder / "checkpoint"
    make_two(directory)
    store, replay = CheckpointStore(directory), ArrayReplay(10)
    store.load()
    store.load_replay(replay, "replay")
    names = {path.name for path in directory.iterdir()}
    for _ in range(3):
        replay.add(3)
        with pytest.raises(OSError):  # noqa: PT011  one of several
            store.save(state_of(3) | {"large": np.zeros(20_000)}, replay, "replay")
        assert {path.name for path in directory.iterdir()} == names
    assert_checkpoint(directory, 2, 10, 5)
    small_disk.free()
    store.save(state_of(3) | {"large": np.zeros(20_000)}, replay, "replay")
    assert_checkpoint(directory, 3, 10, 14)


def test_logging_on_a_full_disk(small_disk: SimpleNamespace, capfd: pytest.CaptureFixture) -> None:
    """One warning; points are kept in memory and are all there once there is room, each once."""
    runs._warned.clear()
    writer = EventWriter(small_disk.folder)
    for step in range(2000):
        writer.add_scalar("a", step / 2, step)
        if step % 50 == 0:
            writer.flush()
    assert capfd.readouterr().err.count("WARNING") == 1
    with pytest.raises(OSError):  # noqa: PT011  one of several
        writer.sync()
    data, end = only(small_disk.folder.glob("events.*")).read_bytes(), 0
    while end < len(data):
        end += 8 + 4 + int.from_bytes(data[end : end + 8], "little") + 4
    assert end == len(data), "half an event is left at the end"
    before = read_scalars(small_disk.folder).get("a", [])
    assert before == [(step, step / 2) for step in range(len(before))]
    small_disk.free()
    writer.close()
    assert read_scalars(small_disk.folder)["a"] == [(step, step / 2) for step in range(2000)]


# ==================== what PyTorch's parts save ====================


def test_torch_parts_round_trip() -> None:
    """Network, optimizer and random generators go on bit for bit, whatever the layout in memory."""
    batch = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)

    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[Any]]:
        torch.manual_seed(seed)
        network = qdagger.QNetwork(5).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
        return network, optimizer, [ModuleState(network), OptimizerState(optimizer), GlobalRandomState()]

    def update(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss = (network(batch) - torch.rand(3, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    network, optimizer, parts = make(1)
    for untrained in (True, False):
        arrays: list[np.ndarray] = []
        saved = json.dumps(pack([part.save() for part in parts], arrays))
        arrays = [array.copy() for array in arrays]
        expected = [update(network, optimizer) for _ in range(3)]
        again, again_optimizer, again_parts = make(2)
        for part, state in zip(again_parts, unpack(json.loads(saved), arrays), strict=True):
            part.load(state)
        assert [update(again, again_optimizer) for _ in range(3)] == expected, untrained


def test_jax_tree_round_trip(tmp_path: Path) -> None:
    """A training state comes back from a file as it was, types and structure; a new run keeps its own."""
    params = {"params": {"Dense_0": {"kernel": jnp.ones((3, 2)), "bias": jnp.arange(2.0)}}}
    optimizer = optax.adam(1e-3)
    state = qdagger_jax.TrainState(params, params, optimizer.init(params), jax.random.PRNGKey(3))
    _, optimizer_state = optimizer.update(params, state.optimizer_state)
    learned = state._replace(optimizer_state=optimizer_state, target_params=jax.tree.map(lambda x: x + 1, params))
    write_file(tmp_path / "file", *packed(TreeState(lambda: learned).save()))
    part = TreeState(lambda: state)
    assert part.restored(state) is state
    header, arrays = read_file(tmp_path / "file")
    part.load(unpack(header, arrays))
    restored = part.restored(state)
    assert jax.tree.structure(restored) == jax.tree.structure(learned)
    for value, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(learned), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


def packed(tree: Any) -> tuple[Any, list[np.ndarray]]:
    """The tree as `write_file` takes it."""
    arrays: list[np.ndarray] = []
    return pack(tree, arrays), arrays


class CutAndResumed(Play):
    """The oracle of test_replay.py in a run that is stopped now and then, and resumed from a checkpoint."""

    def stop_and_resume(self, directory: Path) -> None:
        """A new replay takes the place of the old one; games that had not just begun end here, truncated."""
        just_reset = np.array([len(games) > 1 and not games[-1].actions for games in self.games])
        if just_reset.any() and not just_reset.all():
            return  # a run goes on until then
        state_of = ReplayState if isinstance(self.replay, TorchQDaggerReplay) else JaxReplayState
        store = CheckpointStore(directory)
        store.save({}, state_of(self.replay.replay), "replay")
        self.replay = type(self.replay)(self.length, self.num_envs, self.n_step, self.gamma, seed=5)
        store = CheckpointStore(directory)
        store.load()
        rows = state_of(self.replay.replay)
        store.load_replay(rows, "replay")

        run = object.__new__(Run)
        newest = np.stack([games[-1].observations[-1][-1] for games in self.games])
        run.args, run.phase, run.done, run._replay = SimpleNamespace(seed=1), 2, self.rows, rows
        run._loaded = {"frame": newest, "just_reset": just_reset}
        run.reset(SimpleNamespace(reset=lambda seed=None: None, just_reset=just_reset.copy()))
        if self.rows and not just_reset.all():
            for env, games in enumerate(self.games):
                self.where[env].append((games[-1], len(games[-1].actions)))
                games.append(Game(frame(env, self.rows + 1)))
            self.rows += 1
        assert rows.rows_written == self.rows


def check_replay_after_resuming(backend: type, script: tuple, data: st.DataObject, directory: Path) -> None:
    """However often a run is resumed: every transition is what happened, and none leads from one game to another."""
    num_envs, length, n_step, gamma, events, seed = script
    play = CutAndResumed(backend(length, num_envs, n_step, gamma), num_envs, length, n_step, gamma, seed)
    for step_events in events:
        play.step(step_events)
        if data.draw(st.integers(0, 5)) == 0:
            for _ in range(data.draw(st.integers(1, 2))):
                play.stop_and_resume(directory)
    if usable := play.usable():
        play.check_rows(usable)
    replay = play.replay.replay
    valid = np.asarray(getattr(replay, "rows", replay).valid)
    rows = np.arange(max(0, play.rows - length), play.rows) % length
    assert not (~valid[rows][1:] & ~valid[rows][:-1]).any(), "two final frames follow each other"


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(script=scripts(), data=st.data())
def test_replay_after_resuming(script: tuple, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """PyTorch's replay."""
    check_replay_after_resuming(TorchQDaggerReplay, script, data, tmp_path_factory.mktemp("run") / "checkpoint")


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(script=scripts(), data=st.data())
def test_jax_replay_after_resuming(
    script: tuple, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """JAX's; fewer examples, for most of them are compiled anew."""
    check_replay_after_resuming(JaxQDaggerReplay, script, data, tmp_path_factory.mktemp("run") / "checkpoint")


# ==================== runs ====================

SMALL = {"teacher_steps": 40, "offline_steps": 100, "offline_eval_frequency": 50, "total_timesteps": 300}
SMALL |= {
    "train_frequency": 10,
    "batch_size": 2,
    "save_model": True,
    "target_network_frequency": 30,
    "warmup_updates": 120,
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_cli.py."""
    monkeypatch.setattr("cleanrl_utils.torch_utils.available_cores", lambda: 1)


def fake_score(*args: Any) -> np.ndarray:
    """In place of `play_games`: a score that follows from the evaluation's name."""
    return np.array([float(zlib.crc32(args[-1].encode()) % 1000)])


@pytest.fixture
def no_games(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Evaluations take no time. Returns the names of those that were played."""
    played: list[str] = []
    monkeypatch.setattr("cleanrl_utils.resume.play_games", lambda *args: played.append(args[-1]) or fake_score(*args))
    return played


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a teacher of the game."""
    return write_teacher(tmp_path_factory.mktemp("teacher"))


def args_of(script: Any, teacher: Path, **changes: Any) -> Any:
    """The flags of a small run of ``script``, which may be any."""
    return twin(tiny(teacher, **(SMALL | changes)), script)


def run_in(folder: Path, script: Any, args: Any, patch: pytest.MonkeyPatch) -> Path:
    """Runs the script in ``folder``; returns the run's directory."""
    folder.mkdir(exist_ok=True)
    patch.chdir(folder)
    script.main(args)
    return only(folder.glob("runs/*"))


def resume(script: Any, run_dir: Path, *flags: object) -> None:
    """Goes on with a run as the command line would."""
    script.main(parse_args(script.Args, ["--resume", str(run_dir), *map(str, flags)]))


def signal_at(phase: int, done: int, patch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """Sends a signal once, when the run has done so much of a phase."""
    between, sent = Run._between_steps, []

    def send(run: Run) -> None:
        if (run.phase, run.done) == (phase, done) and not sent:
            sent.append(True)
            signal.raise_signal(number)
        between(run)

    patch.setattr(Run, "_between_steps", send)


def signal_in_evaluation(name: str, patch: pytest.MonkeyPatch) -> None:
    """Sends a signal once, in the middle of an evaluation."""
    play, sent = sys.modules["cleanrl_utils.resume"].play_games, []

    def send(*args: Any) -> np.ndarray:
        if args[-1] == name and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the signal waits for the evaluation")
        return play(*args)

    patch.setattr("cleanrl_utils.resume.play_games", send)


def untimed(scalars: Scalars) -> Scalars:
    """The scalars, those that time something without their values."""
    return {
        tag: [(step, 0.0 if tag in TIMED_TAGS else value) for step, value in events] for tag, events in scalars.items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Callable[[Any], tuple[Scalars, bytes]]:
    """The scalars and the final model of an uninterrupted run of a script, made once."""
    done: dict[Any, tuple[Scalars, bytes]] = {}

    def get(script: Any) -> tuple[Scalars, bytes]:
        if script not in done:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cleanrl_utils.resume.play_games", fake_score)
                folder = tmp_path_factory.mktemp("whole")
                run_dir = run_in(folder, script, args_of(script, teacher), patch)
                args = args_of(script, teacher)
                done[script] = untimed(read_scalars(run_dir)), (run_dir / f"{args.exp_name}.cleanrl_model").read_bytes()
        return done[script]

    return get


STOPS = [(qdagger, 2, 0), (qdagger, 3, 0), (qdagger, 3, 37), (qdagger, 3, 50), (qdagger, 4, 0), (dqn_atari, 1, 0)]
STOPS += [(qdagger_jax, 3, 37), (qdagger_jax, 4, 0), (dqn_atari_jax, 1, 0)]


@pytest.mark.parametrize(("script", "phase", "done"), STOPS)
def test_resumed_run_equals_whole_run(
    script: Any, phase: int, done: int, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """Stopped between phases or in the offline phase: the same scalars and the same model, bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at(phase, done, patch)
        with pytest.raises(SystemExit) as stop:
            run_in(tmp_path / "a", script, args_of(script, teacher), patch)
        assert stop.value.code == 143
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        # What a killed run has logged after its last checkpoint is logged again, and must not be there twice.
        logged = only(run_dir.glob("events.out.tfevents.*"))
        late = EventWriter(run_dir)
        late.add_scalar("charts/SPS", 1.0, 12345)
        late.close()
        logged.write_bytes(logged.read_bytes() + late._path.read_bytes())
        resume(script, run_dir)
    scalars, model = whole(script)
    assert untimed(read_scalars(run_dir)) == scalars
    assert only(p for p in run_dir.glob("*.cleanrl_model") if "offline" not in p.name).read_bytes() == model
    assert len(no_games) == len(set(no_games)), "an evaluation was played twice"
    with pytest.raises(UserError, match="finished"):
        resume(script, run_dir)
    assert [path.suffix for path in (run_dir / "checkpoint").iterdir()] == [".state"]


@pytest.mark.parametrize("name", ["random", "offline 50", "offline 100", "online"])
def test_signal_in_an_evaluation(
    name: str, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """The evaluation is broken off, played again by the resumed run, and nothing else differs."""
    with pytest.MonkeyPatch.context() as patch:
        signal_in_evaluation(name, patch)
        with pytest.raises(SystemExit) as stop:
            run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher), patch)
        assert stop.value.code == 143
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        resume(qdagger, run_dir)
    assert untimed(read_scalars(run_dir)) == whole(qdagger)[0]
    assert sorted(no_games) == sorted(["teacher", "random", "offline 50", "offline 100", "online"])


@pytest.mark.parametrize(
    ("script", "phase", "done"),
    [(qdagger, 2, 16), (qdagger, 4, 130), (dqn_atari, 1, 130), (qdagger_jax, 4, 130), (dqn_atari_jax, 1, 130)],
)
def test_resumed_within_games(
    script: Any, phase: int, done: int, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """Games are others from there on; steps, updates, schedules and log points are not."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at(phase, done, patch, signal.SIGUSR1)
        with pytest.raises(SystemExit) as stop:
            run_in(tmp_path / "a", script, args_of(script, teacher), patch)
        assert stop.value.code == 138
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        replays, seeds, updates = [], [], []
        reset, add = AtariVectorEnv.reset, script.Replay.add
        patch.setattr(AtariVectorEnv, "reset", lambda envs, **kw: seeds.append(list(kw["seed"])) or reset(envs, **kw))
        patch.setattr(script.Replay, "add", lambda replay, *args: replays.append(replay) or add(replay, *args))
        if script is qdagger:
            batch = script.Replay.batch
            patch.setattr(script.Replay, "batch", lambda replay, *args: updates.append(replay) or batch(replay, *args))
        resume(script, run_dir)
    scalars = untimed(read_scalars(run_dir))
    expected, _ = whole(script)
    games = {"charts/episodic_return", "charts/episodic_length"}
    for tag in expected.keys() - games:
        assert [step for step, _ in scalars[tag]] == [step for step, _ in expected[tag]], tag
    assert scalars["charts/epsilon"] == expected["charts/epsilon"]
    assert phase == 2 or any(scalars.get(tag) != expected[tag] for tag in games), "the emulators were restored?"
    assert len({tuple(x) for x in seeds}) == len(seeds), "the same games again"

    replay = replays[0]
    row, total = done // 2, (40 if phase == 2 else 300) // 2  # two environments
    assert sum(x is replay for x in replays) == total - row, "steps were left out or done twice"
    if script is qdagger and phase == 4:
        assert len(updates) == sum(step % 10 == 0 for step in range(131, 301))
    if phase != 2:
        rows = getattr(replay, "rows", replay)
        assert replay.rows_written == total + 1
        assert not rows.valid[row].any(), "the seam is no final frame"
        assert rows.valid[row - 1].all()
        assert not rows.age[row + 1].any(), "games don't begin anew"
        assert (rows.age[row] == rows.age[row - 1] + 1).all()
        assert (rows.frame[row] != rows.frame[row - 1]).any()


def test_stopped_again_and_again(teacher: Path, tmp_path: Path, no_games: list[str]) -> None:
    """Pieces in which nothing is done, or hardly anything, and a longer run than it was to be."""
    args = args_of(qdagger, teacher)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for done in (0, 0, 12, 12, 200):
            with pytest.MonkeyPatch.context() as signals:
                signal_at(4, done, signals, signal.SIGINT)
                with pytest.raises(SystemExit, match="130"):
                    qdagger.main(args)
            run_dir = only(Path("runs").iterdir())
            args = parse_args(qdagger.Args, ["--resume", str(run_dir)])
        resume(qdagger, run_dir, "--total-timesteps", 400)
    scalars = read_scalars(tmp_path / run_dir)
    steps = [step for step, _ in scalars["charts/SPS"]]
    assert steps == [100 + step - 2 for step in (100, 200, 300, 400)]


@pytest.mark.parametrize(
    ("just_reset", "stops"), [([True, False], False), ([False, False], True), ([True, True], True)]
)
def test_no_stop_where_a_game_has_just_ended(just_reset: list[bool], stops: bool) -> None:
    """The seam's final frame would follow that of the game; a step later it does not."""
    run, stopped = object.__new__(Run), []
    run.args, run._last_checkpoint, run._signal = SimpleNamespace(checkpoint_minutes=10.0), float("inf"), None
    run._pause = 0.0
    run._envs = SimpleNamespace(just_reset=np.array(just_reset))
    run._stop = run.save = lambda: stopped.append(True)
    run._between_steps()
    assert not stopped, "nothing was due"
    run._signal = signal.SIGTERM
    run._between_steps()
    assert bool(stopped) == stops


@pytest.mark.parametrize(("seconds", "every"), [(0.5, 600.5), (27, 27 * 51)])
def test_checkpoints_cost_little(seconds: float, every: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular ones are as far apart as the flag says, or so far that they take a fiftieth of the time."""
    now, begun = 0.0, []

    def save() -> None:
        nonlocal now
        begun.append(now)
        run._last_checkpoint = now = now + seconds

    monkeypatch.setattr("cleanrl_utils.resume.time", SimpleNamespace(monotonic=lambda: now))
    run = object.__new__(Run)
    run.args, run._signal, run._envs, run.save = SimpleNamespace(checkpoint_minutes=10.0), None, None, save
    run._last_checkpoint = run._pause = 0.0
    while now < 10_000:
        now += 1
        run._between_steps()
    assert begun[0] == 600
    assert np.abs(np.diff(begun) - every).max() <= 1
    before = len(begun)
    run.end_phase(2)
    run.end_phase(3)
    assert len(begun) == before + 2, "the end of a phase waits"


# ==================== flags ====================


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    """The directory of a run that was stopped at the start of its second phase."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cleanrl_utils.resume.play_games", fake_score)
        patch.setattr("cleanrl_utils.torch_utils.available_cores", lambda: 1)
        signal_at(2, 0, patch)
        with pytest.raises(SystemExit):
            run_in(folder, qdagger, args_of(qdagger, teacher), patch)
    return only((folder / "runs").iterdir())


def test_flags_of_a_resumed_run(stopped: Path, teacher: Path) -> None:
    """They are the run's; those that may change do, and one that is repeated contradicts nothing."""
    flags = ["--resume", str(stopped)]
    args = parse_args(qdagger.Args, flags)
    assert vars(args) == vars(args_of(qdagger, teacher)) | {"resume": str(stopped)}
    args = parse_args(qdagger.Args, [*flags, "--total-timesteps", "999", "--no-save-model", "--batch_size", "2"])
    assert (args.total_timesteps, args.save_model, args.batch_size) == (999, False, 2)
    assert parse_args(qdagger.Args, ["--seed", "5"]) == qdagger.Args(seed=5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-size", "32"], ["--batch-size", "32", "2"]),  # the default, but given
        (["--seed", "2"], ["--seed", "2", "1"]),
        (["--env_id", "PongNoFrameskip-v4"], ["--env-id", "Pong", GAME]),
        (["--no-torch-deterministic"], ["--torch-deterministic"]),
    ],
)
def test_contradicting_flag(flags: list[str], words: list[str], stopped: Path) -> None:
    """Refused by name, with both values."""
    with pytest.raises(UserError) as error:
        parse_args(qdagger.Args, ["--resume", str(stopped), *flags])
    for word in words:
        assert word in str(error.value)


def test_nothing_to_resume(stopped: Path, tmp_path: Path) -> None:
    """One line each, before anything is touched."""
    for path, words in ((tmp_path / "no", "no such directory"), (tmp_path, "no checkpoint")):
        with pytest.raises(UserError, match=words):
            parse_args(qdagger.Args, ["--resume", str(path)])
    with pytest.raises(UserError, match=r"qdagger_dqn_atari_impalacnn\.py"):
        parse_args(dqn_atari.Args, ["--resume", str(stopped)])


def test_still_running(stopped: Path) -> None:
    """Two processes in one directory would overwrite each other's checkpoints."""
    args = parse_args(qdagger.Args, ["--resume", str(stopped)])
    lock = resuming.lock_directory(stopped)
    with pytest.raises(UserError, match="still running"):
        Run(args)
    os.close(lock)


def test_limits_need_checkpoints(teacher: Path) -> None:
    """--max-minutes without checkpoints would lose everything."""
    with pytest.raises(UserError, match="--checkpoint-minutes"):
        qdagger.main(tiny(teacher, max_minutes=1.0, checkpoint_minutes=0.0))
    with pytest.raises(UserError, match="--checkpoint-minutes"):
        qdagger.main(tiny(teacher, checkpoint_minutes=-1.0))


def test_no_checkpoints(teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0 there is no folder, and signals are left alone."""
    handlers = []
    update = qdagger.qdagger_loss
    monkeypatch.setattr(
        qdagger, "qdagger_loss", lambda *args: handlers.append(signal.getsignal(signal.SIGTERM)) or update(*args)
    )
    args = args_of(qdagger, teacher, checkpoint_minutes=0.0, total_timesteps=100)
    run_dir = run_in(tmp_path / "a", qdagger, args, monkeypatch)
    assert not (run_dir / "checkpoint").exists()
    assert set(handlers) == {signal.SIG_DFL}


def test_time_limit(teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture) -> None:
    """It stops by itself with exit code 0 and the command to go on with; the limit is taken over, or given anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        signal_at(3, 20, patch, signal.SIGALRM)  # what the timer sends
        timers = []
        setitimer = signal.setitimer
        patch.setattr(signal, "setitimer", lambda *args: timers.append(args) or setitimer(*args))
        with pytest.raises(SystemExit) as stop:
            qdagger.main(args_of(qdagger, teacher, max_minutes=50.0))
        assert stop.value.code == 0
        assert timers[0] == (signal.ITIMER_REAL, 3000.0)
        assert timers[-1] == (signal.ITIMER_REAL, 0)
        run_dir = only(Path("runs").iterdir())
        assert f"python cleanrl/qdagger_dqn_atari_impalacnn.py --resume {run_dir}" in capfd.readouterr().out
        resume(qdagger, run_dir, "--max-minutes", 0)


# ==================== faults ====================


def test_disk_full_while_training(
    teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on to its end, with one warning, and keeps the checkpoint that it has."""
    runs._warned.clear()
    limited, update = [], qdagger.qdagger_loss
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(*args: Any) -> qdagger.Losses:
        if not limited:
            limited.append(CheckpointStore(only(Path("runs").iterdir()) / "checkpoint").load())
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        return update(*args)

    def lift(run: Run) -> None:
        stores.append(CheckpointStore(run.dir / "checkpoint").load())

    stores: list[Any] = []
    monkeypatch.setattr(qdagger, "qdagger_loss", limit)
    monkeypatch.setattr(qdagger, "save_model", lambda *args: None)  # what can't be saved otherwise is another matter
    monkeypatch.setattr(Run, "finish", lift)
    try:
        run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher, checkpoint_minutes=1e-9), monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    errors = capfd.readouterr().err
    assert errors.count("WARNING") == 1
    assert "CHECKPOINT" in errors
    # In the last phase the state is as large as in the others, so that nothing has been saved since the offline phase.
    assert stores[0]["phase"] == limited[0]["phase"] == 3


def test_disk_full_while_saving_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the file, of which nothing stays behind; other errors of the system keep their traceback."""
    path, error = tmp_path / "x.cleanrl_model", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SystemExit) as stop, one_line_errors(), runs.atomic_write(path):
        pass
    assert stop.value.code == 1
    assert capfd.readouterr().err.startswith(f"error: {path} could not be written (No space left on device); make room")
    assert not list(tmp_path.iterdir())
    error = PermissionError(errno.EPERM, "no")
    with pytest.raises(PermissionError), one_line_errors(), runs.atomic_write(path):
        pass


@pytest.mark.parametrize("dead", [True, False])
def test_dead_network(
    dead: bool,
    teacher: Path,
    tmp_path: Path,
    no_games: list[str],
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One warning when the student does not see what it is shown; none of one that does."""
    if dead:
        forward = qdagger.QNetwork.forward
        monkeypatch.setattr(qdagger.QNetwork, "forward", lambda network, x: forward(network, 0 * x))
    small = {"teacher_steps": 400, "offline_steps": 5, "offline_eval_frequency": 5, "learning_starts": 200}
    args = args_of(qdagger, teacher, batch_size=24, **(small | {"total_timesteps": 220}))
    run_in(tmp_path, qdagger, args, monkeypatch)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "same Q-values" in line]
    assert len(warnings) == dead, warnings
    assert all("phase 3, step 5)" in line and "--learning-rate" in line for line in warnings)


def test_poisoned_batch(teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture) -> None:
    """It stops with exit code 3 and says why; the checkpoint is from before, and from there the run can go on."""
    with pytest.MonkeyPatch.context() as patch:
        batch, drawn = qdagger.Replay.batch, []

        def poison(replay: qdagger.Replay, *args: Any) -> qdagger.Batch:
            drawn.append(True)
            good = batch(replay, *args)
            if len(drawn) < 70:
                return good
            return good._replace(n_step_return=torch.full_like(good.n_step_return, torch.nan))

        patch.setattr(qdagger.Replay, "batch", poison)
        signal_at(3, 60, patch, signal.SIGTERM)
        with pytest.raises(SystemExit):
            run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher), patch)
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        with pytest.raises(SystemExit) as stop, one_line_errors():
            resume(qdagger, run_dir)
    assert stop.value.code == 3
    line = capfd.readouterr().err.splitlines()[-1]
    for word in ("step 100", "n_step_return", "2 not finite", "td_loss nan", "--resume", str(run_dir)):
        assert word in line, line
    assert CheckpointStore(run_dir / "checkpoint").load()["done"] == 60
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run_dir.parent.parent)
        resume(qdagger, run_dir)


def test_poisoned_state_is_never_saved(teacher: Path, tmp_path: Path, no_games: list[str]) -> None:
    """A weight that is not finite is found before a checkpoint is written, whatever the loss says."""
    with pytest.MonkeyPatch.context() as patch:
        move = qdagger.update_target

        def poison(target: WorkingCopy, online: WorkingCopy, tau: float) -> None:
            move(target, online, tau)
            next(iter(target.original.parameters())).data[0, 0, 0, 0] = torch.inf

        patch.setattr(qdagger, "update_target", poison)
        signal_at(3, 31, patch)
        with pytest.raises(TrainingFailure, match="target_network network") as failure:
            run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher, target_network_frequency=31), patch)
    assert failure.value.exit_code == 3
    run_dir = only((tmp_path / "a" / "runs").iterdir())
    assert CheckpointStore(run_dir / "checkpoint").load()["done"] == 0


@pytest.mark.parametrize(("phase", "fails_at", "done"), [(2, 21, 20), (2, 22, 20), (4, 40 + 66, 130)])
def test_emulator_that_dies(
    phase: int, fails_at: int, done: int, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """What there is is saved, the step that failed not counted, and the resumed run makes it.

    In phase 2 each step is received in two halves.
    """
    with pytest.MonkeyPatch.context() as patch:
        recv, calls = AtariVectorEnv.recv, []

        def die(envs: AtariVectorEnv) -> tuple:
            calls.append(True)
            if len(calls) == fails_at:
                raise RuntimeError("core\ndumped")
            return recv(envs)

        patch.setattr(AtariVectorEnv, "recv", die)
        with pytest.raises(TrainingFailure, match=r"emulator failed \(core dumped\).*--resume"):
            run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher), patch)
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        state = CheckpointStore(run_dir / "checkpoint").load()
        assert (state["phase"], state["done"]) == (phase, done)
        resume(qdagger, run_dir)
    scalars = read_scalars(run_dir)
    assert [step for step, _ in scalars["charts/SPS"]] == [198, 298, 398]
    assert len(scalars["losses/loss"]) == len({step for step, _ in scalars["losses/loss"]})


@pytest.mark.parametrize(("phase", "fails_at"), [(2, 2), (4, 3)])
def test_emulator_that_dies_at_the_start(
    phase: int, fails_at: int, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """The checkpoint of the phase's start stands, and the resumed run does not differ. Phase 2 has two emulators."""
    with pytest.MonkeyPatch.context() as patch:
        reset, calls = AtariVectorEnv.reset, []

        def die(envs: AtariVectorEnv, **options: Any) -> tuple:
            calls.append(True)
            if len(calls) == fails_at:
                raise RuntimeError("no ROM")
            return reset(envs, **options)

        patch.setattr(AtariVectorEnv, "reset", die)
        with pytest.raises(TrainingFailure, match=r"emulator failed \(no ROM\).*--resume"):
            run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher), patch)
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        state = CheckpointStore(run_dir / "checkpoint").load()
        assert (state["phase"], state["done"]) == (phase, 0)
        resume(qdagger, run_dir)
    assert untimed(read_scalars(run_dir)) == whole(qdagger)[0]


def test_emulator_that_dies_in_an_evaluation(
    whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is is saved, and the resumed run, which plays the evaluation anew, does not differ."""
    no_play = resuming.play_games
    to_fail = ["random", "offline 50"]

    def play(*args: Any) -> np.ndarray:
        if args[-1] not in to_fail:
            return no_play(*args)
        to_fail.remove(args[-1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AtariVectorEnv, "recv", lambda envs: 1 / 0)
            return play_games(*args)

    def fail(phase: int, done: int, function: Callable, *args: Any) -> None:
        with pytest.raises(TrainingFailure, match=r"emulator failed \(division by zero\).*--resume") as failure:
            function(*args)
        assert failure.value.exit_code == 1
        state = CheckpointStore(only((tmp_path / "a" / "runs").iterdir()) / "checkpoint").load()
        assert (state["phase"], state["done"]) == (phase, done)

    monkeypatch.setattr(resuming, "play_games", play)
    fail(1, 0, run_in, tmp_path / "a", qdagger, args_of(qdagger, teacher), monkeypatch)
    run_dir = only((tmp_path / "a" / "runs").iterdir())
    fail(3, 50, resume, qdagger, run_dir)
    resume(qdagger, run_dir)
    assert untimed(read_scalars(run_dir)) == whole(qdagger)[0]
    assert sorted(no_games) == sorted(["teacher", "random", "offline 50", "offline 100", "online"])


def test_emulator_that_dies_in_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers' emulator fails as the vector environment's does."""
    monkeypatch.setattr(AtariEnv, "step", lambda env, action: 1 / 0)
    with pytest.raises(EmulatorFailure, match=r"emulator failed \(division by zero\)"):
        play_wrapped_game(lambda observation: np.zeros((1, 18), np.float32), GAME, 0.0, 1)


WANDB_RUN = """
import json, os, sys, threading, types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from cleanrl_utils import runs

class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}") if begins else {}
        if "mutation UpsertBucket" in query.get("query", ""):
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": "b", "name": query["variables"]["name"], "displayName": "d", "project": project}
            self.answer(200, {"upsertBucket": {"bucket": bucket, "inserted": True}})
        elif hangs:
            threading.Event().wait()
        else:
            self.answer(500, {})

    def answer(self, status, data):
        body = json.dumps({"data": data}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

begins, hangs = "begins" in sys.argv, "hangs" in sys.argv
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:%d" % server.server_port
runs.WANDB_FINISH_TIMEOUT = 1
args = types.SimpleNamespace(track=True, wandb_project_name="p", wandb_entity="e", env_id="x", exp_name="y", seed=1)
run_dir, writer = runs.start_run(args)
writer.add_scalar("losses/td_loss", 1.5, 3)
runs.finish_run(args, writer, [])
os._exit(0)  # W&B's own clean-up waits for the server once more
"""


@pytest.mark.parametrize("server", ["hangs", "fails", "begins, then hangs"])
def test_wandb_unreachable(server: str, tmp_path: Path) -> None:
    """A server that is out of order costs some lines; what it would have got is on the disk, to be sent later."""
    pytest.importorskip("wandb")
    environ = {"WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "2", "WANDB_HTTP_TIMEOUT": "1"}
    environ["WANDB_X_DISABLE_VIEWER"] = "true"  # ten seconds are spent on asking who one is
    result = subprocess.run(
        [sys.executable, "-c", WANDB_RUN, *server.replace(",", "").split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO), **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    begins = "begins" in server
    assert result.stderr.count("WARNING: W&B can't be reached") == (not begins), result.stderr
    assert ("Timed out finishing run" in result.stderr) == begins, result.stderr
    data = only(tmp_path.glob("wandb/run-*/*.wandb" if begins else "wandb/offline-run-*/*.wandb")).read_bytes()
    assert b"losses/td_loss" in data


# ==================== processes ====================


def test_torture(tmp_path: Path) -> None:
    """Killed at random moments, in checkpoints too, a run ends with every step in its logs once: tests/torture.py."""
    command = [sys.executable, str(REPO / "tests" / "torture.py"), "--kills", "6", "--seed", "1"]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 kills" in result.stdout


def test_signals_to_a_process(teacher: Path, tmp_path: Path) -> None:
    """SIGTERM and two SIGINTs at once, from outside: exit codes, the command to go on with, and a run that does."""
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(args_of(qdagger, teacher)).items()
        if name
        in ("env_id", "teacher_policy_hf_repo", "num_envs", "buffer_size", "learning_starts", "batch_size", "end_e")
    ]
    flags += ["--teacher-eval-episodes=1", "--eval-episodes=1", "--teacher-steps=40", "--offline-steps=100000"]
    flags += ["--checkpoint-minutes=0.0001"]
    run_dir = Path()
    for number, code, times in ((signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 3)):
        resumed = ["--resume", str(run_dir)] if run_dir.parts else flags
        process = subprocess.Popen(
            [sys.executable, REPO / "cleanrl" / "qdagger_dqn_atari_impalacnn.py", *resumed],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        before = newest_number(tmp_path)
        while newest_number(tmp_path) < before + 2:  # it learns, and saves
            assert process.poll() is None
        for _ in range(times):
            process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code
        run_dir = only((tmp_path / "runs").iterdir()).relative_to(tmp_path)
        assert f"python cleanrl/qdagger_dqn_atari_impalacnn.py --resume {run_dir}" in output
        assert CheckpointStore(tmp_path / run_dir / "checkpoint").load()["phase"] >= 1


def newest_number(folder: Path) -> int:
    """Number of the newest checkpoint of the run in ``folder``."""
    return max((int(path.stem) for path in folder.glob("runs/*/checkpoint/*.state")), default=0)


def test_contradiction_in_a_shell(stopped: Path, tmp_path: Path) -> None:
    """One line, exit code 2."""
    result = run_script("qdagger_dqn_atari_impalacnn", tmp_path, "--resume", stopped, "--seed", 7)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --seed is 7")
    assert len(result.stderr.splitlines()) == 1
