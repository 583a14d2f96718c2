"""Runs that are stopped and resumed: signals, kills, flags, divergence and full disks."""

import dataclasses
import errno
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
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
from ale_py.vector_env import AtariVectorEnv
from helpers import (
    AGENTS,
    DQN,
    GAME,
    NETWORKS,
    REPO,
    STUDENT,
    Results,
    Scalars,
    cpu,
    only,
    read_scalars,
    results,
    tiny,
    twin,
    warnings_of,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanrl_utils import run as run_module
from cleanrl_utils.errors import UserError
from cleanrl_utils.files import lock_run
from cleanrl_utils.run import Run, parse_args
from cleanrl_utils.tracking import commit_of, versions

# Windows lacks both.
KILL = getattr(signal, "SIGKILL", 9)
USR1 = getattr(signal, "SIGUSR1", signal.SIGTERM)

QDAGGER = (qdagger, qdagger_jax)
SCRIPTS = pytest.mark.parametrize("script", list(NETWORKS), ids=lambda script: script.__name__)
SMALL = {"teacher_steps": 40, "offline_steps": 100, "offline_eval_frequency": 50, "total_timesteps": 300}
SMALL |= {"train_frequency": 16, "batch_size": 2, "target_network_frequency": 30, "warmup_updates": 120}
SMALL |= {"online_eval_frequency": 101}
EVALUATIONS = ["teacher", "random", "offline 50", "offline 100", "online 102", "online 202", "final"]


class Killed(BaseException):
    """Raised in place of a SIGKILL."""


@pytest.fixture
def evaluations(
    small_networks: None, no_evaluations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Make runs in this process fast, in a folder of their own; return the names of their evaluations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cleanrl_utils.evaluation.draw_run", lambda run_dir: None)  # takes longer than the run
    return no_evaluations


def args_of(script: Any, teacher: Path, **changes: Any) -> Any:
    """Return the flags of a small run of any script."""
    return twin(tiny(teacher, **(SMALL | changes)), script)


def stop(script: Any, args: Any, number: int = signal.SIGTERM, **counters: int) -> Path:
    """Run a script and send it a signal when its progress has these counters; return the run directory."""
    save_if_due = Run.save_if_due
    sent = []

    def interrupt(run: Run, replay: Any = None) -> None:
        if not sent and counters.items() <= vars(run._state["progress"]).items():
            sent.append(True)
            if number == KILL:
                run.log("charts/SPS", 1.0, 12345)  # a point after the checkpoint
                raise Killed
            signal.raise_signal(number)
        save_if_due(run, replay)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "save_if_due", interrupt)
        with pytest.raises((SystemExit, Killed)) as stopped:
            script.main(args)
    assert isinstance(stopped.value, Killed) or stopped.value.code == 128 + number
    return only(Path("runs").iterdir())


def resume(script: Any, run_dir: Path, *flags: object) -> None:
    """Resume a run as the command line does."""
    script.main(parse_args(script.Args, ["--resume", str(run_dir), *map(str, flags)]))


@pytest.fixture
def whole(evaluations: list[str], teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Return a function that returns the curves and models of a whole run of a script with its present network."""

    def get(script: Any) -> Results:
        if (key := (script, script.QNetwork)) not in WHOLE_RUNS:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("whole"))
                script.main(args_of(script, teacher))
                WHOLE_RUNS[key] = results(only(Path("runs").iterdir()))
            evaluations.clear()
        return WHOLE_RUNS[key]

    return get


WHOLE_RUNS: dict[Any, Results] = {}
STOPS = [
    (qdagger, signal.SIGTERM, {"offline_update": 36}),
    (qdagger, KILL, {"teacher_step": 12}),  # each kill is resumed from the checkpoint before the phase
    (qdagger, KILL, {"online_step": 102}),
    (qdagger_jax, signal.SIGTERM, {"offline_update": 36}),
    (qdagger_jax, KILL, {"online_step": 102}),
    (dqn_atari, KILL, {"step": 60}),
]


@pytest.mark.parametrize(("script", "number", "counters"), STOPS)
def test_resumed_run_equals_whole_run(
    script: Any, number: int, counters: dict, whole: Callable, teacher: Path, evaluations: list[str]
) -> None:
    """A run that resumes between two phases or offline updates has the same curves and models, bit for bit."""
    expected = whole(script)
    run_dir = stop(script, args_of(script, teacher), number, **counters)
    resume(script, run_dir)
    assert results(run_dir) == expected
    assert set(evaluations) == set(EVALUATIONS if script in QDAGGER else ["final"])
    assert not (run_dir / "checkpoint").exists()
    with pytest.raises(UserError, match="finished"):
        resume(script, run_dir)


WITHIN_EPISODES = [(qdagger, {"teacher_step": 16}), (qdagger, {"online_step": 190}), (dqn_atari, {"step": 190})]
WITHIN_EPISODES += [(qdagger_jax, {"online_step": 190}), (dqn_atari_jax, {"step": 190})]


def assert_same_steps(run_dir: Path, expected: Scalars) -> None:
    """Check that the curves have the expected steps, but for episodes, and the same ε."""
    scalars = read_scalars(run_dir)
    for tag in expected.keys() - {"charts/episodic_return", "charts/episodic_length"}:
        assert [step for step, _ in scalars[tag]] == [step for step, _ in expected[tag]], tag
    assert scalars["charts/epsilon"] == expected["charts/epsilon"]


@pytest.mark.parametrize(("script", "counters"), WITHIN_EPISODES)
def test_resumed_within_episodes(
    script: Any, counters: dict, whole: Callable, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumes between environment steps has the same steps, updates and schedules, and new episodes.

    Updates come every 16 steps. The losses of the last one are logged every 100 steps.
    """
    expected, _ = whole(script)
    offline = 100 if script in QDAGGER else 0
    for tag in ("losses/td_loss", "losses/q_values"):
        assert [step for step, _ in expected[tag]] == [offline + 98, offline + 198, offline + 298]
    seeds = []
    replays = []
    reset = AtariVectorEnv.reset
    add = script.Replay.add
    monkeypatch.setattr(AtariVectorEnv, "reset", lambda envs, seed: seeds.append(tuple(seed)) or reset(envs, seed=seed))
    run_dir = stop(script, args_of(script, teacher), USR1, **counters)
    before = len(seeds)
    monkeypatch.setattr(script.Replay, "add", lambda self, *args: replays.append(self) or add(self, *args))
    resume(script, run_dir)
    assert_same_steps(run_dir, expected)
    assert seeds[before] not in seeds[:before], "episodes are repeated"
    total = 40 if "teacher_step" in counters else 300
    assert replays[0].steps_added == total // 2, "the steps before are not in the replay buffer"


def stop_in_evaluation(script: Any, args: Any, name: str, number: int) -> Path:
    """Run a script and send it a signal when it plays the evaluation ``name``; return the run directory."""
    play = script.play_episodes

    def interrupted(playing: str, act: Callable, *args: Any) -> list[float]:
        if playing == name:
            signal.raise_signal(number)
            act(np.zeros((1, 4, 84, 84), np.uint8), np.random.default_rng())
            raise AssertionError("the evaluation continues")
        return play(playing, act, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "play_episodes", interrupted)
        with pytest.raises(SystemExit, match=str(128 + number)):
            script.main(args)
    return only(Path("runs").iterdir())


IN_EVALUATIONS = [(qdagger, "random", signal.SIGINT), (qdagger, "offline 50", signal.SIGTERM)]
IN_EVALUATIONS += [(qdagger, "offline 100", USR1), (qdagger, "final", signal.SIGTERM)]
IN_EVALUATIONS += [(script, "online 102", signal.SIGTERM) for script in QDAGGER]
IN_EVALUATIONS += [(script, "final", signal.SIGTERM) for script in (dqn_atari, dqn_atari_jax)]


@pytest.mark.parametrize(("script", "name", "number"), IN_EVALUATIONS)
def test_signal_in_an_evaluation(
    script: Any, name: str, number: int, whole: Callable, teacher: Path, evaluations: list[str]
) -> None:
    """The evaluation ends at once, the resumed run repeats it, and the results are the same.

    In the online phase, what follows from the new episodes differs. Every 101 steps, the first steps of both
    environments that reach a multiple are 102 and 202.
    """
    scalars, models = whole(script)
    run_dir = stop_in_evaluation(script, args_of(script, teacher), name, number)
    resume(script, run_dir)
    found_scalars, found_models = results(run_dir)
    assert list(dict.fromkeys(evaluations)) == (EVALUATIONS if script in QDAGGER else ["final"])
    if name == "online 102":
        assert_same_steps(run_dir, scalars)
        tag = "charts/online/avg_episodic_return"
        assert found_scalars[tag] == scalars[tag]
        before = f"{script.__name__}-online-102"
        assert found_models[before] == models[before]
    else:
        assert (found_scalars, found_models) == (scalars, models)


@pytest.mark.parametrize(("script", "steps"), [(qdagger, 10), (qdagger_jax, 0)])
def test_training_that_is_ended(script: Any, steps: int, teacher: Path, evaluations: list[str]) -> None:
    """The student is evaluated also if --total-timesteps is now below its steps, and below --learning-starts."""
    run_dir = stop(script, args_of(script, teacher, offline_steps=1), online_step=120)
    resume(script, run_dir, "--total-timesteps", steps)
    assert evaluations[-1] == "final"


def test_run_in_a_thread(teacher: Path, evaluations: list[str]) -> None:
    """Notebooks and Ray may call main in a thread, where Python has no signal handlers; checkpoints are saved."""
    with ThreadPoolExecutor() as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "finish", lambda self, returns: None)
        executor.submit(qdagger.main, args_of(qdagger, teacher)).result()
    resume(qdagger, only(Path("runs").iterdir()))
    assert evaluations == [*EVALUATIONS, "final"]


def test_full_disk(teacher: Path, evaluations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a run, before the first phase if no checkpoint can be saved, and names the file; a resume continues."""
    args = args_of(qdagger, teacher)
    run_dir = stop(qdagger, args, online_step=104)
    before = [*evaluations]
    with monkeypatch.context() as patch:
        errors = [OSError(errno.ENOSPC, "No space left on device") for _ in range(2)]
        patch.setattr(os, "fsync", mock.Mock(side_effect=errors))
        with pytest.raises(OSError, match=r"No space left on device.*000001\.state"):
            qdagger.main(args)
        with pytest.raises(OSError, match=r"No space left on device.*cleanrl_model"):
            resume(qdagger, run_dir)
    assert evaluations == before
    resume(qdagger, run_dir)


# ==================== state ====================


def test_optimizer() -> None:
    """A restored optimizer has the saved state, in the memory layout of its parameters, and settings of its own."""
    flags = {"learning_rate": 0.5, "seed": 1}, {"learning_rate": 0.01, "seed": 2}
    saved, restored = (qdagger.Student(qdagger.Args(**each), 4, cpu(qdagger)) for each in flags)
    restored.optimizer.param_groups[0]["fused"] = False
    for parameter in saved.q_network.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.optimizer.step()
    restored.load(saved.dump())
    group = restored.optimizer.param_groups[0]
    assert (group["lr"], group["fused"]) == (0.01, False)
    assert torch.equal(restored.generator.get_state(), saved.generator.get_state())
    for parameter, other in zip(saved.q_network.parameters(), restored.q_network.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            array = restored.optimizer.state[other][name]
            assert torch.equal(array, saved.optimizer.state[parameter][name])
            assert array.stride() == other.stride()


def test_optimizer_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored optimizer has the saved averages, and settings of its own."""
    saved = qdagger_jax.Student(qdagger_jax.Args(seed=1), 4, cpu(qdagger_jax))
    saved.state = saved.state._replace(optimizer_state=jax.tree.map(lambda x: x + 1, saved.state.optimizer_state))
    monkeypatch.setattr(optax, "adam", functools.partial(optax.adam, eps=0.25))
    restored = qdagger_jax.Student(qdagger_jax.Args(seed=2), 4, cpu(qdagger_jax))
    restored.load(saved.dump())
    optimizer_state = restored.state.optimizer_state
    assert optimizer_state.hyperparams["eps"] == 0.25
    jax.tree.map(np.testing.assert_array_equal, optimizer_state.inner_state, saved.state.optimizer_state.inner_state)


@pytest.mark.parametrize("script", QDAGGER, ids=lambda script: script.__name__)
def test_script_that_was_changed(
    script: Any, teacher: Path, evaluations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another network, another optimizer or other state ends a resumed run in one line."""
    run_dir = stop(script, args_of(script, teacher, offline_steps=1), offline_update=1)
    changes = [(script, "QNetwork", NETWORKS[script]), (optax, "adam", optax.sgd)]
    for change in changes if script is qdagger_jax else changes[:1]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*change)
            with pytest.raises(UserError, match="the checkpoint does not fit this script") as error:
                resume(script, run_dir)
        assert len(str(error.value).splitlines()) == 1
    args = parse_args(script.Args, ["--resume", str(run_dir)])
    with pytest.raises(UserError, match="does not fit this script: 'new'"), Run(args, new=np.random.default_rng()):
        pass
    with pytest.raises(UserError, match="its fields are returns, "), Run(args, progress=dqn_atari.Progress()):
        pass


def test_changes_since_the_checkpoint_are_one_warning(
    evaluations: list[str], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The script, the teacher's file and the versions of packages may change; the same files may be elsewhere.

    Flags, commit and versions are in TensorBoard's tables, of the start and of each time the run is resumed.
    """
    run_dir = stop(qdagger, args_of(qdagger, teacher, offline_steps=1), offline_update=1)

    def tables() -> list[str]:
        events = EventAccumulator(str(run_dir)).Reload().Tensors("hyperparameters")
        return [event.tensor_proto.string_val[0].decode() for event in events]

    commit = commit_of(Path(qdagger.__file__))
    (table,) = tables()
    assert {f"|versions|{versions()}|", f"|commit|{commit}|", "|num_envs|2|"} <= set(table.splitlines())

    script = Path(shutil.copy(qdagger.__file__, tmp_path / f"{STUDENT}.py"))
    teacher_file = Path(shutil.copy(teacher / f"{DQN}.cleanrl_model", tmp_path / "copy"))
    monkeypatch.setattr(qdagger.Args, "script", str(script))
    args = parse_args(qdagger.Args, ["--resume", str(run_dir), "--eval-episodes", "77"])

    def resumed_warnings() -> list[str]:
        code = script.read_bytes()
        capsys.readouterr()
        with Run(args, progress=qdagger.Progress(), teacher=teacher_file) as run:
            warnings = warnings_of(capsys)
            script.write_text("edited while the run has the code that it read")
            run.save()
        script.write_bytes(code)
        return warnings

    assert not resumed_warnings()
    script.write_bytes(script.read_bytes() + b"# changed")
    teacher_file.write_bytes(b"another teacher")
    monkeypatch.setattr(run_module, "versions", lambda: "others")
    (warning,) = resumed_warnings()
    assert warning.startswith("WARNING: versions, code, teacher changed since the last checkpoint")
    assert not resumed_warnings()
    assert [("|eval_episodes|77|" in table, "|versions|others|" in table) for table in tables()] == [
        (False, False), (True, False), (True, True), (True, True),
    ]  # fmt: skip


# ==================== divergence ====================


def poison(script: Any, learner: Any, name: str) -> None:
    """Make the first weight of a network infinite: ``target`` or ``online``."""
    if script in (qdagger, dqn_atari):
        network = learner.target_network if name == "target" else learner.q_network
        next(network.parameters()).data[0, 0, 0, 0] = torch.inf
    else:
        entry = "target_params" if name == "target" else "params"
        params = jax.tree.map(lambda array: array + jnp.inf, getattr(learner.state, entry))
        learner.state = learner.state._replace(**{entry: params})


@SCRIPTS
def test_infinite_weights_are_not_saved_as_a_model(script: Any, small_networks: None, tmp_path: Path) -> None:
    learner = AGENTS[script](script.Args(), 4, cpu(script))
    learner.save(tmp_path / "good")
    poison(script, learner, "online")
    with pytest.raises(UserError, match=r"the training diverged to NaN or infinite values; .*--learning-rate"):
        learner.save(tmp_path / "bad")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


DIVERGING = [(qdagger, {"offline_update": 20}), (qdagger_jax, {"offline_update": 20}), (qdagger, {"online_step": 104})]
DIVERGING += [(dqn_atari, {"step": 104}), (dqn_atari_jax, {"step": 104})]


@pytest.mark.parametrize(("script", "counters"), DIVERGING)
def test_diverged(script: Any, counters: dict, teacher: Path, evaluations: list[str], whole: Callable) -> None:
    """A network that becomes NaN ends the run in one line, before it is evaluated or logged."""
    expected, _ = whole(script)
    run_dir = stop(script, args_of(script, teacher), **counters)
    evaluations.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AGENTS[script], "update_target", lambda learner, tau: poison(script, learner, "target"))
        with pytest.raises(UserError, match="diverged"):
            resume(script, run_dir)
    assert not evaluations
    assert all(np.isfinite(value) for points in read_scalars(run_dir).values() for _, value in points)
    resume(script, run_dir)
    assert_same_steps(run_dir, expected)


# ==================== flags ====================


@pytest.fixture
def stopped(evaluations: list[str], teacher: Path) -> Path:
    """Return the directory of a run that was stopped before its online phase; it has 4 environments instead of 16."""
    args = args_of(qdagger, teacher, offline_steps=1, hf_entity="somebody", num_envs=16)
    return stop(qdagger, args, offline_update=1)


def test_flags_of_a_resumed_run(stopped: Path, teacher: Path) -> None:
    """They are those that the run uses; some may change; a repeated one contradicts nothing."""
    flags = ["--resume", str(stopped)]
    was = vars(args_of(qdagger, teacher, offline_steps=1, hf_entity="somebody", num_envs=4))
    assert vars(parse_args(qdagger.Args, flags)) == was | {"resume": str(stopped)}
    changes = {"total_timesteps": 999, "save_model": False, "batch_size": 2}
    flags += ["--total-timesteps", "999", "--no-save-model", "--batch_size", "2", "--num-envs", "4"]
    assert vars(parse_args(qdagger.Args, flags)) == was | changes | {"resume": str(stopped)}
    for contradiction, words in (
        ("--batch-size 32", "--batch-size is 32 .* 2"),  # the default, but given
        ("--env_id PongNoFrameskip-v4", "--env-id is .Pong.* .Klax"),
        ("--no-bf16", "--bf16 is False .* True"),
        ("--num-envs 16", "--num-envs is 16 .* uses 4; leave out what changes it"),  # what the run was started with
        ("--num-envs 2", "--num-envs is 2 .* uses 4;"),
    ):
        with pytest.raises(UserError, match=words):
            parse_args(qdagger.Args, ["--resume", str(stopped), *contradiction.split()])


def test_buffer_size_of_a_resumed_run(stopped: Path, evaluations: list[str]) -> None:
    """It may change until the online phase has begun; after that the error is one line."""
    args = parse_args(qdagger.Args, ["--resume", str(stopped), "--buffer-size", "600"])
    stop(qdagger, args, online_step=120)
    with pytest.raises(UserError, match=r"it has 150 steps .* now would have 100; leave --buffer-size out"):
        resume(qdagger, stopped, "--buffer-size", 400)
    resume(qdagger, stopped, "--total-timesteps", 400)
    assert evaluations[-1] == "final"
    assert [step for step, _ in read_scalars(stopped)["charts/SPS"]] == [97, 197, 297, 397]


def test_finished_training_has_no_more_steps(teacher: Path, evaluations: list[str]) -> None:
    """After training, --total-timesteps can't be raised, and --save-model can still be given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "finish", lambda self, returns: sys.exit(0))
        with pytest.raises(SystemExit):
            qdagger.main(args_of(qdagger, teacher, save_model=False))
    run_dir = only(Path("runs").iterdir())
    assert not (run_dir / f"{STUDENT}.cleanrl_model").exists()
    with pytest.raises(UserError, match=r"deleted at the end of the training; leave --total-timesteps out"):
        resume(qdagger, run_dir, "--total-timesteps", 999)
    resume(qdagger, run_dir, "--save-model")
    assert (run_dir / f"{STUDENT}.cleanrl_model").exists()


def test_run_that_cannot_be_resumed(stopped: Path, tmp_path: Path) -> None:
    """No run, the run of another or a changed script, or a run that another process runs: one line each."""
    for path, problem in ((tmp_path / "no", "there is no such directory"), (tmp_path, "there is no checkpoint in it")):
        with pytest.raises(UserError, match=problem):
            parse_args(qdagger.Args, ["--resume", str(path)])
    with pytest.raises(UserError, match=r"qdagger_dqn_atari_impalacnn\.py"):
        parse_args(dqn_atari.Args, ["--resume", str(stopped)])
    changed = dataclasses.make_dataclass("Args", [("new_flag", int, 1)], bases=(qdagger.Args,))
    changed.__module__ = STUDENT
    with pytest.raises(UserError, match="this script has other flags than the run; resume it with the script"):
        parse_args(changed, ["--resume", str(stopped)])
    args = parse_args(qdagger.Args, ["--resume", str(stopped)])
    lock = lock_run(stopped)
    with pytest.raises(UserError, match="still running in another process; stop it first"):
        qdagger.main(args)
    lock.release()


# ==================== processes ====================


def newest_number(folder: Path) -> int:
    """Return the number of the newest checkpoint of the run in ``folder``."""
    return max((int(path.stem) for path in folder.glob("runs/*/checkpoint/*.state")), default=0)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait until ``condition`` holds, while the process runs."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.posix
def test_signals_to_a_process(teacher: Path, tmp_path: Path) -> None:
    """After Ctrl-C, also pressed several times, the printed command resumes the run; nohup's SIGHUP is ignored.

    After a second Ctrl-C, which ended the reader of the output too, the exit code is the same.
    """
    flags = f"--env-id {GAME} --num-envs 2 --buffer-size 1000 --learning-starts 20 --batch-size 4 --end-e 0.8 "
    flags += f"--teacher-steps 60 --teacher-eval-episodes 1 --teacher-policy-hf-repo {teacher} --offline-steps 100000"
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(REPO)}, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, str(REPO / "cleanrl" / f"{STUDENT}.py"), *flags.split()]
    ignore_hangups = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    process = subprocess.Popen([*command, "--checkpoint-minutes=0.001"], preexec_fn=ignore_hangups, **options)
    wait_for(lambda: newest_number(tmp_path) > 4, process)
    process.send_signal(signal.SIGHUP)
    number = newest_number(tmp_path)
    wait_for(lambda: newest_number(tmp_path) > number + 1, process)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "\r" not in output
    (command,) = (line.partition("resume with: ")[2] for line in output.splitlines() if "resume with: " in line)
    assert command.startswith("python ")
    assert "stopped by SIGINT" in output

    process = subprocess.Popen([sys.executable, *shlex.split(command)[1:]], **options)
    number = newest_number(tmp_path)
    wait_for(lambda: newest_number(tmp_path) > number, process)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
