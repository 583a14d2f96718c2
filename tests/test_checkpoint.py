"""Checkpoints and resuming: files that survive anything, and runs that go on as if nothing had happened."""

import errno
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import GAME, NETWORKS, TIMED_TAGS, Scalars, only, read_scalars, run_script, tiny, twin, write_teacher
from tqdm import tqdm

from cleanrl_utils import checkpoint, tracking
from cleanrl_utils import run as running
from cleanrl_utils.atari import Step
from cleanrl_utils.checkpoint import CheckpointStore, DamagedFile, NotFinite, as_array, dump, load
from cleanrl_utils.checks import EmulatorFailure, TrainingFailure, UserError, one_line_errors
from cleanrl_utils.evaluation import play_games, play_wrapped_game
from cleanrl_utils.run import Run, parse_args
from cleanrl_utils.tracking import EventWriter

REPO = Path(__file__).parent.parent

# ==================== files ====================


class Ring(NamedTuple):
    """The least that a store needs of a ring."""

    frame: torch.Tensor
    reward: torch.Tensor


class CountingReplay:
    """Steps of two environments that say which they are."""

    def __init__(self, length: int):
        self.length, self.steps_added, self.age = length, 0, np.zeros(2, np.int32)
        self.ring = Ring(torch.zeros(length, 2, 3, dtype=torch.uint8), torch.zeros(length, 2))

    def add(self, steps: int) -> None:
        for step in range(self.steps_added, self.steps_added + steps):
            self.ring.frame[step % self.length] = torch.tensor([[step % 251, step // 251, 7], [step % 241, 9, 9]])
            self.ring.reward[step % self.length] = torch.tensor([step, -step])
        self.steps_added += steps
        self.age += steps


def state_and_parts(number: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a checkpoint has beside its replay, and what tells which one it is."""
    return {"number": number, "nested": [{"x": 1e-300}, None, "ä"]}, {"weights": bytes([number, 0, 255]), "empty": b""}


def assert_checkpoint(directory: Path, number: int, length: int, steps: int) -> None:
    """The directory's newest whole checkpoint is that of ``number``, with the last ``length`` of ``steps`` steps."""
    store, replay, expected = CheckpointStore(directory), CountingReplay(length), CountingReplay(length)
    assert store.load() == state_and_parts(number)
    store.load_replay(replay, "replay")
    expected.add(steps)
    assert replay.steps_added == steps
    np.testing.assert_array_equal(replay.age, expected.age)
    for array, other in zip(replay.ring, expected.ring, strict=True):
        assert torch.equal(array, other)


def reopen(directory: Path, length: int) -> tuple[CheckpointStore, CountingReplay]:
    """A store and a replay that go on from what is in the directory."""
    store, replay = CheckpointStore(directory), CountingReplay(length)
    store.load()
    store.load_replay(replay, "replay")
    return store, replay


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 30),
    added=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    reopened=st.lists(st.booleans(), min_size=8, max_size=8),
    segment_bytes=st.sampled_from([40, 100, 10**6]),
)
def test_replay_round_trip(
    length: int, added: list[int], reopened: list[bool], segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However many steps come between two checkpoints, and whoever goes on from them: all steps come back."""
    directory = tmp_path_factory.mktemp("run") / "checkpoint"
    store, replay = CheckpointStore(directory), CountingReplay(length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SEGMENT_BYTES", segment_bytes)
        for number, steps in enumerate(added):
            replay.add(steps)
            store.save(*state_and_parts(number), replay, "replay")
            assert_checkpoint(directory, number, length, replay.steps_added)
            if reopened[number]:
                store, replay = reopen(directory, length)
    # Nothing is left of what no checkpoint needs: of a ring's steps at most two checkpoints' worth, and their segments.
    assert len(list(directory.glob("*.state"))) == min(len(added), 2)
    assert not list(directory.glob("*.tmp"))


def test_only_new_steps_are_written(tmp_path: Path) -> None:
    """Each step is written once; a replay that was dropped, and steps that were overwritten, leave the disk."""
    directory = tmp_path / "checkpoint"
    store, replay = CheckpointStore(directory), CountingReplay(10)
    present: set[str] = set()

    def save(number: int, *replay: Any) -> tuple[set[str], set[str]]:
        """The segments that a checkpoint adds to the disk, and takes from there; their names without the last part."""
        nonlocal present
        store.save(*state_and_parts(number), *replay)
        before, present = present, {path.name for path in directory.glob("*.replay")}
        added, gone = ({name.rpartition("-")[0] for name in names} for names in (present - before, before - present))
        return added, gone

    for number, expected in enumerate(
        [
            ({"replay-0-4"}, set()),
            ({"replay-4-8"}, set()),
            ({"replay-8-10", "replay-10-12"}, set()),
            ({"replay-12-16"}, set()),  # step 4 of the second is still in the ring
            ({"replay-16-20"}, {"replay-0-4"}),
        ]
    ):
        replay.add(4)
        assert save(number, replay, "replay") == expected, number
    store, replay = reopen(directory, 10)
    replay.add(1)  # who goes on may change the newest step: its segment is written again
    assert save(5, replay, "replay") == ({"replay-16-20", "replay-20-21"}, {"replay-4-8", "replay-8-10"})
    other = CountingReplay(10)
    other.add(3)
    assert save(6, other, "other")[0] == {"other-0-3"}
    save(7)
    save(8)
    assert not present


def make_two(directory: Path) -> None:
    """Two checkpoints, number 1 with 3 steps and number 2 with 5."""
    store, replay = CheckpointStore(directory), CountingReplay(10)
    for number, steps in ((1, 3), (2, 2)):
        replay.add(steps)
        store.save(*state_and_parts(number), replay, "replay")


def newest_segment(directory: Path) -> Path:
    """The segment of the steps that only the second checkpoint of :func:`make_two` has."""
    return only(directory.glob("replay-3-5-*.replay"))


@pytest.mark.parametrize("find", [lambda directory: directory / "000002.state", newest_segment])
def test_any_damage_is_noticed(find: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A bit flipped in any byte, an end cut off anywhere: it says so and takes the checkpoint before.

    Or it does no harm: nothing in a zip file guards its dates, for one, and nothing reads them.
    """
    directory = tmp_path / "checkpoint"
    make_two(directory)
    path = find(directory)
    good = path.read_bytes()

    def is_noticed(data: bytes) -> bool:
        path.write_bytes(data)
        state, _ = CheckpointStore(directory).load()
        errors = capsys.readouterr().err.splitlines()
        if state["number"] == 2:
            assert not errors
            assert_checkpoint(directory, 2, 10, 5)
            return False
        (line,) = errors
        assert line.startswith("WARNING: ")
        assert path.name in line
        return True

    assert all(is_noticed(data) for data in [*(good[:i] for i in range(len(good))), bytes(len(good))])
    noticed = [is_noticed(good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :]) for i in range(len(good))]
    with zipfile.ZipFile(io.BytesIO(good)) as file:
        contents = [file.read(name) for name in file.namelist()]
    for content in contents:
        assert all(noticed[good.index(content) :][: len(content)])
    path.unlink()
    assert_checkpoint(directory, 1, 10, 3)
    path.write_bytes(good)
    assert_checkpoint(directory, 2, 10, 5)


def test_damage_after_the_check(tmp_path: Path) -> None:
    """A segment that changes between two reads is still no wrong replay."""
    make_two(tmp_path / "checkpoint")
    store, replay = CheckpointStore(tmp_path / "checkpoint"), CountingReplay(10)
    store.load()
    segment = newest_segment(tmp_path / "checkpoint")
    data = bytearray(segment.read_bytes())
    data[data.index(b"\x93NUMPY") + 130] ^= 1  # in the first array's numbers
    segment.write_bytes(data)
    with pytest.raises(DamagedFile, match=segment.name):
        store.load_replay(replay, "replay")


def test_going_on_after_damage(tmp_path: Path) -> None:
    """The next checkpoint takes the damaged one's place, and the one that was gone on from is the one before."""
    directory = tmp_path / "checkpoint"
    make_two(directory)
    (directory / "000002.state").write_bytes(b"")
    store, replay = reopen(directory, 10)
    replay.add(2)
    store.save(*state_and_parts(3), replay, "replay")
    assert_checkpoint(directory, 3, 10, 5)
    (directory / "000002.state").write_bytes(b"")
    assert_checkpoint(directory, 1, 10, 3)


def test_a_segment_of_another_future(tmp_path: Path) -> None:
    """A segment that no checkpoint refers to, of the same steps as the run makes again, is never taken for theirs."""
    directory = tmp_path / "checkpoint"
    make_two(directory)
    (directory / "000002.state").unlink()  # a kill came between the segment and its state
    lost = newest_segment(directory)
    assert_checkpoint(directory, 1, 10, 3)
    store, replay = reopen(directory, 10)
    replay.add(2)
    for array in replay.ring:
        array[3:5] += 1
    store.save(*state_and_parts(3), replay, "replay")
    assert not lost.exists()
    _, again = reopen(directory, 10)
    assert again.steps_added == 5
    assert all(torch.equal(array, other) for array, other in zip(again.ring, replay.ring, strict=True))


def test_nothing_whole(tmp_path: Path) -> None:
    """Both damaged, none at all: one line each, and what to do."""
    make_two(tmp_path / "checkpoint")
    segment = only((tmp_path / "checkpoint").glob("replay-0-3-*.replay"))
    segment.write_bytes(b"x")
    with pytest.raises(UserError, match=rf"{segment.name}.*anew"):
        CheckpointStore(tmp_path / "checkpoint").load()
    with pytest.raises(UserError, match="no checkpoint"):
        CheckpointStore(tmp_path / "nothing").load()


def test_no_code_is_run(tmp_path: Path) -> None:
    """Pickles in files whose checksums are right are refused, wherever they are."""

    class Touch:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "trap"),)

    directory = tmp_path / "checkpoint"
    make_two(directory)
    np.savez(newest_segment(directory).open("wb"), frame=np.array([Touch()], object), reward=np.zeros((2, 2)))
    store = CheckpointStore(directory)
    store.load()
    with pytest.raises(ValueError, match="allow_pickle"):
        store.load_replay(CountingReplay(10), "replay")
    torch.save({"weight": Touch()}, zipped := io.BytesIO())
    network = torch.nn.Linear(1, 1)
    parts = [network, torch.optim.Adam(network.parameters()), torch.Generator(), np.random.default_rng()]
    for data in (zipped.getvalue(), pickle.dumps(Touch(), protocol=2)):
        for part in [*parts, lambda: {"weight": np.zeros(1)}]:
            with pytest.raises(Exception):  # noqa: B017, PT011  each library has its own
                load(part, data)
    assert not (tmp_path / "trap").exists()


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

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    def counted(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if count():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    class File(io.FileIO):
        """Not buffered: all that is written can be the last that is."""

        def write(self, data: Any) -> int:
            if count():
                super().write(bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return super().write(data)

    patch.setattr(Path, "open", counted(lambda path, mode: File(path, mode)))
    patch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "unlink", "mkdir"):
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
            store, replay = reopen(directory, 10)
            replay.add(9)  # over the end of the ring: two new segments, and one that is no longer needed
            with pytest.MonkeyPatch.context() as patch:
                kill_at(number, patch)
                store.save(*state_and_parts(3), replay, "replay")

        status = in_child(save_third)
        found = CheckpointStore(directory).load()[0]["number"]
        outcomes.add(found)
        assert_checkpoint(directory, found, 10, {2: 5, 3: 14}[found])
        store, replay = reopen(directory, 10)
        replay.add(1)
        store.save(*state_and_parts(4), replay, "replay")
        assert_checkpoint(directory, 4, 10, replay.steps_added)
        assert not list(directory.glob("*.tmp"))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills, number = kills + 1, number + 1
    assert "damaged" not in capfd.readouterr().err, "a file had its name before it was whole"
    assert outcomes == {2, 3}
    assert kills >= 25


def test_a_name_is_given_to_what_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loss of power: content, then name, then the folder; segments before the state; deletions last."""
    directory = tmp_path / "checkpoint"
    make_two(directory)
    store, replay = reopen(directory, 10)
    replay.add(9)
    done: list[tuple[str, str]] = []
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def note(what: str, path: Path | str) -> None:
        path = Path(path)
        done.append(
            (what, "folder" if path == directory else path.name.removesuffix(".tmp").rpartition("-")[0] or "state")
        )

    monkeypatch.setattr(os, "fsync", lambda file: note("sync", os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(Path, "replace", lambda path, other: note("name", other) or replace(path, other))
    monkeypatch.setattr(Path, "unlink", lambda path, **kw: note("delete", path) or unlink(path, **kw))
    store.save(*state_and_parts(3), replay, "replay")
    store.save(*state_and_parts(4), replay, "replay")
    expected = []
    for name in ("replay-4-10", "replay-10-14", "state", "state"):
        expected += [("sync", name), ("name", name), ("sync", "folder")]
    assert [step for step in done if step[0] != "delete"] == expected
    assert {name for what, name in done if what == "delete"} == {"state", "replay-0-3", "replay-3-5"}
    assert "delete" not in {what for what, _ in done[:9]}


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
    store, replay = reopen(directory, 10)
    names = {path.name for path in directory.iterdir()}
    state, parts = state_and_parts(3)
    for _ in range(3):
        replay.add(3)
        with pytest.raises(OSError) as error:  # noqa: PT011  one of several
            store.save(state, parts | {"large": bytes(80_000)}, replay, "replay")
        assert error.value.filename == str(directory / "000003.state")
        assert {path.name for path in directory.iterdir()} == names
    assert_checkpoint(directory, 2, 10, 5)
    small_disk.free()
    store.save(state, parts | {"large": bytes(80_000)}, replay, "replay")
    assert CheckpointStore(directory).load() == (state, parts | {"large": bytes(80_000)})
    store.save(state, parts, replay, "replay")
    assert_checkpoint(directory, 3, 10, 14)


def test_logging_on_a_full_disk(small_disk: SimpleNamespace, capfd: pytest.CaptureFixture) -> None:
    """One warning; points are kept in memory and are all there once there is room, each once."""
    tracking._warned.clear()
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


# ==================== parts ====================


def test_random_generators() -> None:
    """They go on where they were, in others made from another seed; one of another device's kind keeps its own."""
    first, second = np.random.default_rng(1), np.random.default_rng(2)
    first.random(7)
    first.integers(0, 5, 3, np.int32)  # leaves half a draw behind
    load(second, dump(first, "rng"))
    np.testing.assert_array_equal(first.integers(0, 5, 9, np.int32), second.integers(0, 5, 9, np.int32))

    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.rand(3, generator=one)
    load(other, dump(one, "generator"))
    assert torch.equal(torch.rand(9, generator=one), torch.rand(9, generator=other))
    torch.save(torch.zeros(16, dtype=torch.uint8), file := io.BytesIO())  # as large as CUDA's
    load(other, file.getvalue())
    assert torch.equal(torch.rand(9, generator=one), torch.rand(9, generator=other))


def learner(seed: int, **changes: Any) -> tuple[torch.nn.Module, torch.optim.Adam]:
    """A network and its optimizer as the script makes them, but for ``changes``."""
    torch.manual_seed(seed)
    network = qdagger.QNetwork(5).to(memory_format=torch.channels_last)
    return network, torch.optim.Adam(network.parameters(), **({"lr": 1e-3, "fused": True} | changes))


def gradient_step(network: torch.nn.Module, optimizer: torch.optim.Adam, seed: int) -> torch.Tensor:
    """Learns from random numbers; returns the loss."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8, generator=generator)
    loss = (network(observation) - torch.rand(3, 5, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_torch_parts_round_trip() -> None:
    """Network and optimizer go on bit for bit, trained or not, and all is laid out in memory as it was."""
    network, optimizer = learner(1)
    for trained in (False, True):
        parts = dump(network, "network"), dump(optimizer, "optimizer")
        again, again_optimizer = learner(2)
        for part, data in zip((again, again_optimizer), parts, strict=True):
            load(part, data)
        for parameter, other in zip(network.parameters(), again.parameters(), strict=True):
            assert other.stride() == parameter.stride()
            for name, value in again_optimizer.state[other].items():
                # What is laid out otherwise than the parameter is slower to compute with, and silently so.
                assert value.stride() == (() if name == "step" else parameter.stride()), name
        expected = [gradient_step(network, optimizer, seed) for seed in range(3)]
        assert [gradient_step(again, again_optimizer, seed) for seed in range(3)] == expected, trained


def settings_of(optimizer: torch.optim.Adam) -> dict[str, Any]:
    """What flags and device decide."""
    (group,) = optimizer.param_groups
    return {name: value for name, value in group.items() if name != "params"}


def test_optimizer_keeps_its_own_settings() -> None:
    """Learning rate, `fused` and `capturable` come from flags and device of the run that goes on, not from the file."""
    network, optimizer = learner(1)
    gradient_step(network, optimizer, 0)
    for group in optimizer.param_groups:  # as on a GPU
        group |= {"lr": torch.tensor(0.5), "capturable": True}
    weights, data = dump(network, "network"), dump(optimizer, "optimizer")
    results = []
    for changes in ({}, {"lr": 2e-3}, {"fused": False}, {"fused": None, "capturable": True, "lr": torch.tensor(1e-3)}):
        again, again_optimizer = learner(2, **changes)
        load(again, weights)
        settings_before = settings_of(again_optimizer)
        load(again_optimizer, data)
        assert settings_of(again_optimizer) == settings_before
        if not changes.get("capturable"):  # which a CPU does not compute with
            gradient_step(again, again_optimizer, 1)
            results.append(torch.cat([parameter.detach().flatten() for parameter in again.parameters()]))
    for group in optimizer.param_groups:
        group |= {"lr": 1e-3, "capturable": False}
    gradient_step(network, optimizer, 1)
    expected = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert torch.equal(results[0], expected)
    assert not torch.allclose(results[1], expected, atol=1e-6), "the learning rate is that of the file"
    torch.testing.assert_close(results[2], expected)


def test_jax_state_round_trip() -> None:
    """A training state comes back as it was, types and structure, and learns on bit for bit."""
    optimizer = optax.adam(lambda n: 1e-3 * jnp.minimum((n + 1) / 5, 1.0))
    params = {"params": {"Dense_0": {"kernel": jnp.ones((3, 2)), "bias": jnp.arange(2.0)}}}
    new = qdagger_jax.TrainState(params, params, optimizer.init(params), jax.random.PRNGKey(3))

    def learn(state: qdagger_jax.TrainState) -> qdagger_jax.TrainState:
        key, draw = jax.random.split(state.key)
        gradients = jax.tree.map(lambda x: x + jax.random.normal(draw, x.shape), state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
        return state._replace(params=optax.apply_updates(params, updates), optimizer_state=optimizer_state, key=key)

    def assert_same(state: qdagger_jax.TrainState, expected: qdagger_jax.TrainState) -> None:
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        for value, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            assert (value.dtype, value.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(value, other)

    learned = learn(learn(new))._replace(target_params=jax.tree.map(lambda x: x + 1, params))
    restored = load(lambda: new, dump(lambda: learned, "state"))
    assert_same(restored, learned)
    assert_same(learn(restored), learn(learned))


def test_what_is_not_finite_is_named() -> None:
    """One NaN anywhere, and it is said where; whole numbers are left alone."""
    network, optimizer = learner(1)
    gradient_step(network, optimizer, 0)
    optimizer.state[network.network[5].bias]["exp_avg_sq"][7] = torch.inf
    dump(network, "q_network")
    with pytest.raises(NotFinite, match=r"optimizer state \d+ exp_avg_sq"):
        dump(optimizer, "optimizer")
    network.network[0].conv.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(NotFinite, match=r"q_network network\.0\.conv\.weight"):
        dump(network, "q_network")
    tree = {"count": np.int32(3), "mu": [np.zeros(2), np.array([1.0, -np.inf])]}
    with pytest.raises(NotFinite, match="state mu 1"):
        dump(lambda: tree, "state")


# ==================== replays of runs that were stopped ====================


class Played(NamedTuple):
    """A step of all environments as it was played, and whether the run that played it broke off behind it."""

    step: Step
    action: np.ndarray
    teacher_q_values: np.ndarray


def make_replay(script: Any, length: int, num_envs: int) -> Any:
    """An empty replay of any script; a QDagger one for 3 actions."""
    args = script.Args(num_envs=num_envs, buffer_size=length * num_envs)
    device = [torch.device("cpu")] if script in (qdagger, dqn_atari) else []
    if script in (qdagger, qdagger_jax):
        return script.Replay(args.buffer_size, 3, args, *device)
    return script.Replay(args, *device)


def add_to(script: Any, replay: Any, played: Played) -> None:
    """Appends what was played."""
    convert = torch.from_numpy if script in (qdagger, dqn_atari) else np.asarray
    teacher = [convert(played.teacher_q_values)] if script in (qdagger, qdagger_jax) else []
    replay.add(convert(played.step.observation), played.action, played.step, *teacher)


def random_step(rng: np.random.Generator, num_envs: int) -> Played:
    """Anything at all, with many resets."""
    flags = rng.random((3, num_envs)) < 0.3
    observation = rng.integers(0, 256, (num_envs, 4, 84, 84), np.uint8)
    step = Step(observation, rng.integers(-2, 3, num_envs).astype(np.int32), *flags, [])
    return Played(step, rng.integers(0, 3, num_envs), rng.normal(size=(num_envs, 3)).astype(np.float32))


def resumed(script: Any, directory: Path, length: int, num_envs: int, steps: int) -> tuple[CheckpointStore, Any]:
    """Store and replay of a run that goes on in the middle of the online phase, as a script has them after `reset`."""
    run, replay = object.__new__(Run), make_replay(script, length, num_envs)
    run._store = CheckpointStore(directory)
    run._store.load()
    run.args, run.phase, run.done = SimpleNamespace(seed=1), "online", steps * num_envs
    run.register_replay("online", replay)
    run.reset(SimpleNamespace(reset=lambda seed=None: None))
    return run._store, replay


def check_seams(script: Any, length: int, num_envs: int, events: list[tuple[int, str]], directory: Path) -> None:
    """However often a run is stopped or killed, its replay is that of one whose games all ended at these steps.

    Args:
        events: numbers of steps to play, and what comes after them: "save", "stop" (with a checkpoint) or "kill".
    """
    rng, store, replay = np.random.default_rng(0), CheckpointStore(directory), make_replay(script, length, num_envs)
    played: list[Played] = []
    saved: list[Played] = []
    store.save({}, {}, replay, "online")
    for steps, event in [*events, (1, "stop")]:
        for _ in range(steps):
            played.append(random_step(rng, num_envs))
            add_to(script, replay, played[-1])
        if event in ("save", "stop"):
            store.save({}, {}, replay, "online")
            saved = list(played)
        if event in ("stop", "kill"):
            played = list(saved)
            store, replay = resumed(script, directory, length, num_envs, len(played))
            if played:  # the oracle: the games ended here
                last = played[-1]
                played[-1] = last._replace(step=last.step._replace(reset=np.ones(num_envs, bool)))
            saved = list(played)
    expected = make_replay(script, length, num_envs)
    for step in played:
        add_to(script, expected, step)
    assert replay.steps_added == expected.steps_added
    np.testing.assert_array_equal(replay.age, expected.age)
    slots = np.arange(max(0, len(played) - length), len(played)) % length
    for name, array in replay.ring._asdict().items():
        np.testing.assert_array_equal(as_array(array)[slots], as_array(getattr(expected.ring, name))[slots], name)
    if played:
        assert not as_array(replay.ring.valid)[(len(played) - 1) % length].any()


@pytest.mark.parametrize("script", [qdagger, dqn_atari])
@settings(max_examples=25)
@given(
    length=st.integers(6, 12),
    events=st.lists(st.tuples(st.integers(0, 13), st.sampled_from(["save", "stop", "kill"])), max_size=6),
    segment_bytes=st.sampled_from([1, 40_000, 2**27]),
)
def test_seams(
    script: Any,
    length: int,
    events: list[tuple[int, str]],
    segment_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """PyTorch's replays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SEGMENT_BYTES", segment_bytes)
        check_seams(script, length, 2, events, tmp_path_factory.mktemp("run") / "checkpoint")


@pytest.mark.parametrize("script", [qdagger_jax, dqn_atari_jax])
@pytest.mark.parametrize(
    "events",
    [[(4, "stop"), (3, "stop")], [(5, "save"), (3, "kill"), (4, "stop"), (0, "stop"), (8, "save"), (1, "kill")]],
)
def test_jax_seams(script: Any, events: list[tuple[int, str]], tmp_path: Path) -> None:
    """JAX's: a few examples, for each of which XLA compiles anew."""
    check_seams(script, 7, 2, events, tmp_path / "checkpoint")


# ==================== runs ====================

SMALL = {"teacher_steps": 40, "offline_steps": 100, "offline_eval_frequency": 50, "total_timesteps": 300}
SMALL |= {"train_frequency": 10, "batch_size": 2, "target_network_frequency": 30, "warmup_updates": 120}
SMALL |= {"save_model": True}
EVALUATIONS = ["offline 100", "offline 50", "online", "random", "teacher"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_cli.py."""
    monkeypatch.setattr("cleanrl_utils.device.available_cores", lambda: 1)


def fake_score(q_function: Any, *, description: str, **game: Any) -> np.ndarray:
    """In place of `play_games`: a score that follows from the evaluation's name."""
    return np.array([float(zlib.crc32(description.encode()) % 1000)])


@pytest.fixture
def no_games(small_networks: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Neither learning nor evaluations take time. Returns the names of the evaluations that were played."""
    played: list[str] = []

    def play(q_function: Any, **game: Any) -> np.ndarray:
        played.append(game["description"])
        return fake_score(q_function, **game)

    monkeypatch.setattr(running, "play_games", play)
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


def signal_at(phase: str, done: int, patch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
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
    play, sent = running.play_games, []

    def send(q_function: Any, **game: Any) -> np.ndarray:
        if game["description"] == name and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGTERM)
            play_games(q_function, **game)
            raise AssertionError("the signal waits for the evaluation")
        return play(q_function, **game)

    patch.setattr(running, "play_games", send)


def checkpoint_of(run_dir: Path) -> dict[str, Any]:
    """The state of the newest checkpoint."""
    return CheckpointStore(run_dir / "checkpoint").load()[0]


def untimed(scalars: Scalars) -> Scalars:
    """The scalars, those that time something without their values."""
    return {
        tag: [(step, 0.0 if tag in TIMED_TAGS else value) for step, value in events] for tag, events in scalars.items()
    }


class WholeRun(NamedTuple):
    """What an uninterrupted run leaves."""

    scalars: Scalars
    model: bytes
    updates: int


def final_model(run_dir: Path) -> bytes:
    """The file that --save-model made."""
    return only(path for path in run_dir.glob("*.cleanrl_model") if "offline" not in path.name).read_bytes()


def count_updates(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, when a run is over, the number of updates that its optimizer has made."""
    counted, finish = [], Run.finish

    def note(run: Run) -> None:
        parts = run._parts
        if "optimizer" in parts:
            counted.append(int(next(iter(parts["optimizer"].state.values()))["step"]))
        else:
            counted.append(int(parts["state"]().optimizer_state[0].count))
        finish(run)

    patch.setattr(Run, "finish", note)
    return counted


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Callable[[Any], WholeRun]:
    """What an uninterrupted run of a script with its present network leaves, made once."""
    done: dict[Any, WholeRun] = {}

    def get(script: Any) -> WholeRun:
        if (key := (script, script.QNetwork)) not in done:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(running, "play_games", fake_score)
                updates = count_updates(patch)
                run_dir = run_in(tmp_path_factory.mktemp("whole"), script, args_of(script, teacher), patch)
                done[key] = WholeRun(untimed(read_scalars(run_dir)), final_model(run_dir), *updates)
        return done[key]

    return get


STOPS = [(qdagger, "teacher data", 0), (qdagger, "offline", 0), (qdagger, "offline", 50), (qdagger, "online", 0)]
STOPS += [(qdagger_jax, "offline", 37), (qdagger_jax, "online", 0)]
STOPS += [(dqn_atari, "training", 0), (dqn_atari_jax, "training", 0)]


@pytest.mark.parametrize(("script", "phase", "done"), STOPS)
def test_resumed_run_equals_whole_run(
    script: Any, phase: str, done: int, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
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
    assert untimed(read_scalars(run_dir)) == whole(script).scalars
    assert final_model(run_dir) == whole(script).model
    assert len(no_games) == len(set(no_games)), "an evaluation was played twice"
    with pytest.raises(UserError, match="finished"):
        resume(script, run_dir)
    assert not (run_dir / "checkpoint").exists()


def test_resumed_impala_equals_whole_run(
    whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the network of the script, in the layout and precision that it computes in."""
    monkeypatch.setattr(qdagger, "QNetwork", NETWORKS[qdagger])
    test_resumed_run_equals_whole_run(qdagger, "offline", 37, whole, teacher, tmp_path, no_games)


@pytest.mark.parametrize("script", [qdagger, qdagger_jax])
def test_offline_resumed_at_odd_counts(
    script: Any, teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every copy of the target network, log and evaluation is made once, when it is due, wherever a run goes on.

    Stopped between two of them, right before one, right after one, and where all but the last evaluation is done.
    """
    run_of: list[Run] = []
    copied: list[int] = []
    begin, copy = Run.__init__, script.update_target
    monkeypatch.setattr(Run, "__init__", lambda run, args: run_of.append(run) or begin(run, args))
    monkeypatch.setattr(script, "update_target", lambda *args: copied.append(run_of[-1].done + 1) or copy(*args))
    monkeypatch.chdir(tmp_path)
    args = args_of(script, teacher, offline_steps=203, offline_eval_frequency=70, target_network_frequency=40)
    for done in (37, 39, 101, 140, 202):
        with pytest.MonkeyPatch.context() as patch:
            signal_at("offline", done, patch)
            with pytest.raises(SystemExit, match="143"):
                script.main(args)
        run_dir = only(Path("runs").iterdir())
        args = parse_args(script.Args, ["--resume", str(run_dir)])
    signal_at("online", 0, monkeypatch)
    with pytest.raises(SystemExit, match="143"):
        script.main(args)
    assert copied == [40, 80, 120, 160, 200]
    steps = {tag: [step for step, _ in events] for tag, events in read_scalars(run_dir).items()}
    for tag in ("loss", "q_loss", "distill_loss", "updates_per_second"):
        assert steps[f"charts/offline/{tag}"] == [100, 200], tag
    assert steps["charts/offline/avg_episodic_return"] == [70, 140, 203]
    assert no_games == ["teacher", "random", "offline 70", "offline 140", "offline 203"]
    models = {int(path.stem.rpartition("-")[2]) for path in run_dir.glob("*-offline-*.cleanrl_model")}
    assert models == {70, 140, 203}


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
    assert untimed(read_scalars(run_dir)) == whole(qdagger).scalars
    assert sorted(no_games) == EVALUATIONS


WITHIN_GAMES = [(qdagger, "teacher data", 16), (qdagger, "online", 130), (dqn_atari, "training", 130)]
WITHIN_GAMES += [(qdagger_jax, "online", 130), (dqn_atari_jax, "training", 130)]


@pytest.mark.parametrize(("script", "phase", "done"), WITHIN_GAMES)
def test_resumed_within_games(
    script: Any, phase: str, done: int, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """Games are others from there on; steps, updates, schedules and log points are not."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at(phase, done, patch, signal.SIGUSR1)
        with pytest.raises(SystemExit) as stop:
            run_in(tmp_path / "a", script, args_of(script, teacher), patch)
        assert stop.value.code == 138
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        replays, seeds, updates = [], [], count_updates(patch)
        reset, add = AtariVectorEnv.reset, script.Replay.add
        patch.setattr(AtariVectorEnv, "reset", lambda envs, **kw: seeds.append(list(kw["seed"])) or reset(envs, **kw))
        patch.setattr(script.Replay, "add", lambda replay, *args: replays.append(replay) or add(replay, *args))
        resume(script, run_dir)
    scalars, expected = untimed(read_scalars(run_dir)), whole(script).scalars
    games = {"charts/episodic_return", "charts/episodic_length"}
    for tag in expected.keys() - games:
        assert [step for step, _ in scalars[tag]] == [step for step, _ in expected[tag]], tag
    assert scalars["charts/epsilon"] == expected["charts/epsilon"]
    assert phase == "teacher data" or any(scalars.get(tag) != expected[tag] for tag in games), "games are the same"
    assert len({tuple(x) for x in seeds}) == len(seeds), "the same games again"
    assert updates == [whole(script).updates]

    replay = replays[0]
    seam, total = done // 2, (40 if phase == "teacher data" else 300) // 2  # two environments
    assert sum(x is replay for x in replays) == total - seam, "steps were left out or done twice"
    assert replay.steps_added == total
    valid, age, frame = map(as_array, (replay.ring.valid, replay.ring.age, replay.ring.frame))
    assert not valid[seam - 1].any(), "transitions lead from one game to another"
    assert valid[seam - 2].all()
    assert valid[seam].all()
    assert not age[seam].any(), "games don't begin anew"
    assert (age[seam - 1] == age[seam - 2] + 1).all()
    assert (frame[seam] != frame[seam - 1]).any()


def test_stopped_again_and_again(teacher: Path, tmp_path: Path, no_games: list[str]) -> None:
    """Pieces in which nothing is done, or hardly anything, and a longer run than it was to be."""
    args = args_of(qdagger, teacher)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        reset, seeds = AtariVectorEnv.reset, []
        patch.setattr(AtariVectorEnv, "reset", lambda envs, **kw: seeds.append(tuple(kw["seed"])) or reset(envs, **kw))
        for done in (0, 0, 12, 12, 200):
            with pytest.MonkeyPatch.context() as signals:
                signal_at("online", done, signals, signal.SIGINT)
                with pytest.raises(SystemExit, match="130"):
                    qdagger.main(args)
            run_dir = only(Path("runs").iterdir())
            args = parse_args(qdagger.Args, ["--resume", str(run_dir)])
        resume(qdagger, run_dir, "--total-timesteps", 400)
    steps = [step for step, _ in read_scalars(tmp_path / run_dir)["charts/SPS"]]
    assert steps == [100 + step - 2 for step in (100, 200, 300, 400)]
    assert len(set(seeds)) == 1 + len({12, 200}), "the same games again"


def test_minutes_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as many as the flag says, from the end of one to the beginning of the next."""
    now, begun = 0.0, []

    def save() -> None:
        nonlocal now
        begun.append(now)
        run._last_checkpoint = now = now + 27

    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now))
    run = object.__new__(Run)
    run.args, run._signal, run._over, run.save = SimpleNamespace(checkpoint_minutes=10.0), None, [], save
    run._last_checkpoint = 0.0
    run._progress_written, run.losses = float("inf"), None
    while now < 10_000:
        now += 1
        run._between_steps()
    assert begun[0] == 600
    assert np.abs(np.diff(begun) - 627).max() <= 1
    before = len(begun)
    run.end_phase("teacher data")
    run.end_phase("offline")
    assert len(begun) == before + 2, "the end of a phase waits"


@pytest.mark.parametrize("script", [qdagger, dqn_atari])
def test_progress(
    script: Any, teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """progress.json says what a run does, in every phase, and in the end that it is over."""
    reports: list[dict[str, Any]] = []
    write = Run._write_progress

    def collect(run: Run, *args: Any, **kwargs: Any) -> None:
        write(run, *args, **kwargs)
        reports.append(json.loads((run.dir / "progress.json").read_text()))

    monkeypatch.setattr(Run, "_write_progress", collect)
    monkeypatch.setattr(  # one that knows its rate from the first steps on
        tracking, "progress_bar", lambda total, _, unit, initial: tqdm(total=total, initial=initial, mininterval=0)
    )
    monkeypatch.setattr(running, "PROGRESS_EVERY", -1.0)
    args = args_of(script, teacher, total_timesteps=100)
    main_phase = "online" if script is qdagger else "training"
    signal_at(main_phase, 40, monkeypatch)
    with pytest.raises(SystemExit):
        run_in(tmp_path / "a", script, args, monkeypatch)
    run_dir = only((tmp_path / "a" / "runs").iterdir())
    assert not reports[-1]["finished"]
    resume(script, run_dir)
    assert not list(run_dir.glob("*.tmp"))

    for report in reports:
        assert report["finished"] == (report is reports[-1])
        assert report["seconds_left"] is None or 0 <= report["seconds_left"] < 3600
    names, counted = [], {}
    for report in reports:
        if report["phase"] not in names[-1:]:
            names.append(report["phase"])
        counted.setdefault(report["phase"], []).append((report["done"], report["total"]))
    score = {name: fake_score(None, description=name)[0] for name in no_games}
    steps = [(done, 100) for done in range(0, 100, 2)]
    steps.insert(20, (40, 100))  # where it was stopped
    if script is qdagger:
        assert names == ["evaluation", "teacher data", "offline", "online", "evaluation"]
        assert counted["teacher data"] == [(done, 40) for done in range(0, 40, 2)]
        updates = [(done, 100) for done in range(100)]
        assert counted["offline"] == [*updates[:51], updates[50], *updates[51:], (100, 100)]
        assert [report["return"] for report in reports[:2]] == [score["teacher"], score["random"]]
        offline = [report["return"] for report in reports if report["phase"] == "offline"]
        assert offline[-1] == score["offline 100"]
        assert set(offline[51:-1]) == {score["offline 50"]}
        assert any(report["seconds_left"] for report in reports if report["phase"] == "offline")
    else:
        assert names == ["training", "evaluation"]
    assert counted[main_phase] == steps
    for report in reports[-2:]:  # after the evaluation, and at the end
        assert report["return"] == score["online" if script is qdagger else "eval"]
        assert (report["done"], report["total"], report["seconds_left"]) == (0, 0, None)


def test_progress_on_a_full_disk(
    teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left as it was, with one warning."""
    tracking._warned.clear()
    write = Path.write_text

    def fail(path: Path, *args: Any) -> int:
        if path.name.startswith("progress.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *args)

    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr(running, "PROGRESS_EVERY", -1.0)
    run_in(tmp_path / "a", dqn_atari, args_of(dqn_atari, teacher, total_timesteps=30, learning_starts=10), monkeypatch)
    assert capfd.readouterr().err.count("WARNING: progress.json can't be written (No space left on device)") == 1


# ==================== flags ====================


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    """The directory of a run that was stopped before its teacher played."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "play_games", fake_score)
        patch.setattr("cleanrl_utils.device.available_cores", lambda: 1)
        signal_at("teacher data", 0, patch)
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
        (["--num-envs", "16"], ["--num-envs", "16", "2"]),
        (["--no-bf16"], ["--bf16"]),
    ],
)
def test_contradicting_flag(flags: list[str], words: list[str], stopped: Path) -> None:
    """Refused by name, with both values."""
    with pytest.raises(UserError) as error:
        parse_args(qdagger.Args, ["--resume", str(stopped), *flags])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("script", [qdagger, dqn_atari_jax])
def test_model_wanted_after_all(
    script: Any, teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--save-model`` on resuming a run that was stopped when its last evaluation was over."""
    end = Run.end_phase

    def stop(run: Run, phase: str) -> None:
        if phase == "evaluation":
            signal.raise_signal(signal.SIGTERM)
        end(run, phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "end_phase", stop)
        with pytest.raises(SystemExit, match="143"):
            run_in(tmp_path / "a", script, args_of(script, teacher, save_model=False), patch)
    run_dir = only((tmp_path / "a" / "runs").iterdir())
    monkeypatch.chdir(tmp_path / "a")
    resume(script, run_dir, "--save-model")
    assert final_model(run_dir)


def test_no_more_steps_once_training_is_over(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be promised in silence."""
    monkeypatch.chdir(tmp_path)
    run = Run(tiny(teacher))
    run.end_phase("online")
    run.close()
    flags = ["--resume", str(run.dir), "--total-timesteps"]
    assert parse_args(qdagger.Args, [*flags, str(run.args.total_timesteps)]).resume
    with pytest.raises(UserError, match=r"--total-timesteps is 999999 and the training of .* is over, after"):
        parse_args(qdagger.Args, [*flags, "999999"])


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
    lock = running.lock_directory(stopped)
    with pytest.raises(UserError, match="still running"):
        Run(args)
    os.close(lock)


def test_a_video_that_is_gone_is_not_missed(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only ``runs/`` was copied, a resumed run could otherwise neither end nor be uploaded."""
    monkeypatch.chdir(tmp_path)
    run = Run(tiny(teacher))
    kept, gone = Path("kept.mp4"), Path("gone.mp4")
    kept.touch()
    run.videos = [kept, gone]
    run.save()
    run.close()
    run = Run(parse_args(qdagger.Args, ["--resume", str(run.dir)]))
    run.close()
    assert run.videos == [kept]


def test_limits_need_checkpoints(teacher: Path) -> None:
    """--max-minutes without checkpoints would lose everything."""
    with pytest.raises(UserError, match="--checkpoint-minutes"):
        qdagger.main(tiny(teacher, max_minutes=1.0, checkpoint_minutes=0.0))
    with pytest.raises(UserError, match="--checkpoint-minutes"):
        qdagger.main(tiny(teacher, checkpoint_minutes=-1.0))


def test_no_checkpoints(teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0 there is no folder, and signals are left alone."""
    handlers = []
    loss = qdagger.qdagger_loss
    monkeypatch.setattr(
        qdagger, "qdagger_loss", lambda *args: handlers.append(signal.getsignal(signal.SIGTERM)) or loss(*args)
    )
    args = args_of(qdagger, teacher, checkpoint_minutes=0.0, offline_steps=10, total_timesteps=50)
    run_dir = run_in(tmp_path / "a", qdagger, args, monkeypatch)
    assert not (run_dir / "checkpoint").exists()
    assert set(handlers) == {signal.SIG_DFL}


def test_time_limit(teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture) -> None:
    """It stops by itself with exit code 0 and the command to go on with; the limit is taken over, or given anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        signal_at("offline", 20, patch, signal.SIGALRM)  # what the timer sends
        timers = []
        setitimer = signal.setitimer
        patch.setattr(signal, "setitimer", lambda *args: timers.append(args) or setitimer(*args))
        with pytest.raises(SystemExit) as stop:
            qdagger.main(args_of(qdagger, teacher, max_minutes=50.0))
        assert stop.value.code == 0
        assert timers[0] == (signal.ITIMER_REAL, 3000.0)
        assert timers[-1] == (signal.ITIMER_REAL, 0)
        run_dir = only(Path("runs").iterdir())
        assert f"resume with: python {Path(qdagger.__file__)} --resume {run_dir}" in capfd.readouterr().out
        assert parse_args(qdagger.Args, ["--resume", str(run_dir)]).max_minutes == 50.0
        resume(qdagger, run_dir, "--max-minutes", 0)


# ==================== faults ====================


def test_disk_full_while_training(
    teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on to its end, with one warning, and keeps the checkpoint that it has."""
    tracking._warned.clear()
    limited, loss = [], qdagger.qdagger_loss
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(*args: Any) -> qdagger.Losses:
        if not limited:
            limited.append(checkpoint_of(only(Path("runs").iterdir())))
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        return loss(*args)

    kept: list[Any] = []
    monkeypatch.setattr(qdagger, "qdagger_loss", limit)
    monkeypatch.setattr(qdagger, "save_model", lambda *args: None)  # what can't be saved otherwise is another matter
    monkeypatch.setattr(Run, "finish", lambda run: kept.append(checkpoint_of(run.dir)))
    try:
        run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher, checkpoint_minutes=1e-9), monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    errors = capfd.readouterr().err
    assert errors.count("WARNING") == 1
    assert "CHECKPOINT" in errors
    assert kept == limited


def test_disk_full_while_saving_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names the file, of which nothing stays behind; other errors of the system keep their traceback."""
    path, error = tmp_path / "x.cleanrl_model", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SystemExit) as stop, one_line_errors():
        qdagger.save_model(torch.nn.Linear(1, 1), path)
    assert stop.value.code == 1
    assert capfd.readouterr().err.startswith(f"error: {path} could not be written (No space left on device); make room")
    assert not list(tmp_path.iterdir())
    error = PermissionError(errno.EPERM, "no")
    with pytest.raises(PermissionError), one_line_errors():
        qdagger_jax.save_model({"params": {"x": np.zeros(1)}}, path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seen", [0, 1e-3, 1])
def test_dead_network(
    seen: float,
    teacher: Path,
    tmp_path: Path,
    no_games: list[str],
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One warning, printed and logged, when the student sees hardly anything of what it is shown; else none."""
    forward = qdagger.QNetwork.forward
    monkeypatch.setattr(
        qdagger.QNetwork,
        "forward",
        lambda network, x: (1 - seen) * forward(network, 0 * x) + seen * forward(network, x),
    )
    small = {"teacher_steps": 400, "offline_steps": 5, "offline_eval_frequency": 5, "learning_starts": 200}
    args = args_of(qdagger, teacher, batch_size=32, **(small | {"total_timesteps": 220}))
    run_dir = run_in(tmp_path, qdagger, args, monkeypatch)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "same Q-values" in line]
    assert len(warnings) == (seen < 1), warnings
    assert all("(offline, step 5)" in line and "--learning-rate" in line for line in warnings)
    events = EventAccumulator(str(run_dir)).Reload()
    logged = events.Tensors("warning/text_summary") if "warning/text_summary" in events.Tags()["tensors"] else []
    assert [f"WARNING: {text.tensor_proto.string_val[0].decode()}" for text in logged] == warnings


@pytest.mark.parametrize(("found", "evaluations"), [(99, 50), (75, 75)])
def test_poisoned_batch(
    found: int, evaluations: int, teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture
) -> None:
    """It stops with exit code 3 and says why, at a log point or an evaluation, whichever is first; checkpoint and
    models are from before, and from there the run can go on.
    """
    with pytest.MonkeyPatch.context() as patch:
        batch, drawn = qdagger.Replay.batch, []

        def poison(replay: qdagger.Replay, *args: Any) -> qdagger.Batch:
            drawn.append(True)
            good = batch(replay, *args)
            if len(drawn) < 70:
                return good
            return good._replace(n_step_return=torch.full_like(good.n_step_return, torch.nan))

        patch.setattr(qdagger.Replay, "batch", poison)
        signal_at("offline", 60, patch, signal.SIGTERM)
        with pytest.raises(SystemExit):
            run_in(tmp_path / "a", qdagger, args_of(qdagger, teacher, offline_eval_frequency=evaluations), patch)
        run_dir = only((tmp_path / "a" / "runs").iterdir())
        with pytest.raises(SystemExit) as stop, one_line_errors():
            resume(qdagger, run_dir)
    assert stop.value.code == 3
    line = capfd.readouterr().err.splitlines()[-1]
    for word in (f"(offline, step {found})", "q_values nan", "td_loss nan", "--resume", str(run_dir)):
        assert word in line, line
    assert checkpoint_of(run_dir)["done"] == 60
    assert [path for path in run_dir.glob("*.cleanrl_model") if "offline-50" not in path.name] == []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run_dir.parent.parent)
        resume(qdagger, run_dir)


def test_poisoned_at_the_end(
    teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no log point has noticed stops the run at the end of the phase, which it names."""
    loss, counted = dqn_atari.dqn_loss, []

    def poison(*args: Any) -> dqn_atari.Losses:
        counted.append(True)
        losses = loss(*args)
        return losses._replace(loss=losses.loss * torch.nan) if len(counted) == 11 else losses

    monkeypatch.setattr(dqn_atari, "dqn_loss", poison)
    found = r"\(training, step 130\); last update: loss nan, q_values \S+ to \S+; no checkpoint yet"
    with pytest.raises(TrainingFailure, match=found) as failure:
        run_in(tmp_path / "a", dqn_atari, args_of(dqn_atari, teacher, total_timesteps=130), monkeypatch)
    assert failure.value.exit_code == 3
    assert len(counted) == 11


@pytest.mark.parametrize(
    ("script", "name"),
    [(qdagger, "target_network network.0.weight"), (qdagger_jax, "state target_params params Conv_0")],
)
def test_poisoned_state_is_never_saved(
    script: Any, name: str, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """A weight that is not finite is found before a checkpoint is written, whatever the loss says."""
    with pytest.MonkeyPatch.context() as patch:
        move = script.update_target

        def poison(target: Any, *args: Any) -> Any:
            state = move(target, *args)
            if script is qdagger:
                next(iter(target.parameters())).data[0, 0, 0, 0] = torch.inf
                return None
            leaves, tree = jax.tree.flatten(state.target_params)
            bad = jax.tree.unflatten(tree, [leaves[0] + jnp.inf, *leaves[1:]])
            return state._replace(target_params=bad)

        patch.setattr(script, "update_target", poison)
        signal_at("offline", 31, patch)
        with pytest.raises(TrainingFailure, match=name) as failure:
            run_in(tmp_path / "a", script, args_of(script, teacher, target_network_frequency=31), patch)
    assert failure.value.exit_code == 3
    state = checkpoint_of(only((tmp_path / "a" / "runs").iterdir()))
    assert (state["over"], state["done"]) == (["teacher", "teacher data"], 0)


@pytest.mark.parametrize(("phase", "fails_at", "done"), [("teacher data", 11, 20), ("online", 20 + 66, 130)])
def test_emulator_that_dies(
    phase: str, fails_at: int, done: int, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """What there is is saved, the step that failed not counted, and the resumed run makes it."""
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
        state = checkpoint_of(run_dir)
        assert (state["phase"], state["done"]) == (phase, done)
        resume(qdagger, run_dir)
    scalars = read_scalars(run_dir)
    assert [step for step, _ in scalars["charts/SPS"]] == [198, 298, 398]
    assert [step for step, _ in scalars["losses/loss"]] == [198, 298, 398]


@pytest.mark.parametrize(("over", "fails_at"), [("teacher", 1), ("offline", 2)])
def test_emulator_that_dies_at_the_start(
    over: str, fails_at: int, whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str]
) -> None:
    """The checkpoint of the phase's start stands, and the resumed run does not differ."""
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
        state = checkpoint_of(run_dir)
        assert (state["over"][-1], state["done"]) == (over, 0)
        resume(qdagger, run_dir)
    assert untimed(read_scalars(run_dir)) == whole(qdagger).scalars


def test_emulator_that_dies_in_an_evaluation(
    whole: Callable, teacher: Path, tmp_path: Path, no_games: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is is saved, and the resumed run, which plays the evaluation anew, does not differ."""
    no_play = running.play_games
    to_fail = ["random", "offline 50"]

    def play(q_function: Any, **game: Any) -> np.ndarray:
        if game["description"] not in to_fail:
            return no_play(q_function, **game)
        to_fail.remove(game["description"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AtariVectorEnv, "recv", lambda envs: 1 / 0)
            return play_games(q_function, **game)

    def fail(phase: str, done: int, function: Callable, *args: Any) -> None:
        with pytest.raises(TrainingFailure, match=r"emulator failed \(division by zero\).*--resume") as failure:
            function(*args)
        assert failure.value.exit_code == 1
        state = checkpoint_of(only((tmp_path / "a" / "runs").iterdir()))
        assert (state["phase"], state["done"]) == (phase, done)

    monkeypatch.setattr(running, "play_games", play)
    fail("", 0, run_in, tmp_path / "a", qdagger, args_of(qdagger, teacher), monkeypatch)
    run_dir = only((tmp_path / "a" / "runs").iterdir())
    fail("offline", 50, resume, qdagger, run_dir)
    resume(qdagger, run_dir)
    assert untimed(read_scalars(run_dir)) == whole(qdagger).scalars
    assert sorted(no_games) == EVALUATIONS


def test_emulator_that_dies_in_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers' emulator fails as the vector environment's does."""
    monkeypatch.setattr(AtariEnv, "step", lambda env, action: 1 / 0)
    with pytest.raises(EmulatorFailure, match=r"emulator failed \(division by zero\)"):
        play_wrapped_game(lambda observation: np.zeros((1, 18), np.float32), GAME, 0.0, 1)


def test_video_that_cannot_be_written(
    teacher: Path, tmp_path: Path, no_games: list[str], capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on without it, with one warning, and the games that were played count."""
    tracking._warned.clear()
    failure = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    monkeypatch.setattr(running, "play_wrapped_game", mock.Mock(side_effect=failure))
    args = args_of(qdagger, teacher, capture_video=True)
    assert read_scalars(run_in(tmp_path / "a", qdagger, args, monkeypatch))["eval/episodic_return"]
    assert sorted(no_games) == EVALUATIONS
    assert capfd.readouterr().err.count("WARNING: a video can't be written (Broken pipe)") == 1


WANDB_RUN = """
import json, os, sys, threading, types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from cleanrl_utils import tracking

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
tracking.WANDB_FINISH_TIMEOUT = 1
args = types.SimpleNamespace(track=True, wandb_project_name="p", wandb_entity="e", env_id="x", exp_name="y", seed=1)
run_dir = tracking.new_run_dir(args)
writer, _ = tracking.open_run(args, run_dir)
writer.add_scalar("losses/td_loss", 1.5, 3)
tracking.finish_run(args, writer, [])
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
    assert b"losses/td_loss" in data, result.stderr


# ==================== processes ====================


def test_torture(tmp_path: Path) -> None:
    """Killed at random moments, in checkpoints too, a run ends with every step in its logs once: tests/torture.py."""
    command = [sys.executable, str(REPO / "tests" / "torture.py"), "--kills", "6", "--seed", "2", "--small"]
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 kills" in result.stdout


def test_signals_to_a_process(teacher: Path, tmp_path: Path) -> None:
    """SIGTERM, several SIGINTs at once, SIGHUP: exit codes, the command to go on with, and a run that does."""
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(args_of(qdagger, teacher)).items()
        if name
        in ("env_id", "teacher_policy_hf_repo", "num_envs", "buffer_size", "learning_starts", "batch_size", "end_e")
    ]
    flags += ["--teacher-eval-episodes=1", "--eval-episodes=1", "--teacher-steps=40", "--offline-steps=100000"]
    flags += ["--checkpoint-minutes=0.0001"]
    run_dir = Path()
    script = REPO / "cleanrl" / "qdagger_dqn_atari_impalacnn.py"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup, which processes would inherit
    for number, code, times in ((signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 3), (signal.SIGHUP, 129, 1)):
        resumed = ["--resume", str(run_dir)] if run_dir.parts else flags
        process = subprocess.Popen(
            [sys.executable, script, *resumed],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        before = newest_number(tmp_path)
        while newest_number(tmp_path) < before + 2:  # it learns, and saves
            assert process.poll() is None
            time.sleep(0.1)  # on the same core
        for _ in range(times):
            process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code
        run_dir = only((tmp_path / "runs").iterdir()).relative_to(tmp_path)
        assert f"resume with: python {script} --resume {run_dir}" in output
        assert checkpoint_of(tmp_path / run_dir)["phase"]


STOPPED_UNREAD = """
import os, signal, sys
import qdagger_dqn_atari_impalacnn as qdagger
from cleanrl_utils.checks import one_line_errors
from cleanrl_utils.run import Run
with one_line_errors():
    run = Run(qdagger.Args(num_envs=1))
    steps = run.steps("offline", 9)
    next(steps)
    print("it runs", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGINT)
    next(steps)
"""


def test_ctrl_c_that_ends_the_reader_too(tmp_path: Path) -> None:
    """As it does with ``2>&1 | tee log``: the run saves all the same."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_UNREAD],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'cleanrl'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not process.stdout.readline().endswith("it runs\n"):
        assert process.poll() is None
    process.stdout.close()
    process.communicate("\n", timeout=120)
    assert process.returncode == 130
    saved = checkpoint_of(only((tmp_path / "runs").iterdir()))
    assert (saved["phase"], saved["done"]) == ("offline", 1)


def test_nohup(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGHUP that is ignored stays so."""
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = Run(tiny(teacher))
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    run.close()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def newest_number(folder: Path) -> int:
    """Number of the newest checkpoint of the run in ``folder``."""
    return max((int(path.stem) for path in folder.glob("runs/*/checkpoint/*.state")), default=0)


def test_contradiction_in_a_shell(stopped: Path, tmp_path: Path) -> None:
    """One line, exit code 2."""
    result = run_script("qdagger_dqn_atari_impalacnn", tmp_path, "--resume", stopped, "--seed", 7)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --seed is 7")
    assert len(result.stderr.splitlines()) == 1
