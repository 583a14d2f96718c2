"""What ``main`` does: each script runs once per set of sizes, and a recorder notes the calls that it makes.

The environments return noise, so that each step differs from all others.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import dqn_atari
import dqn_atari_jax
import jax
import numpy as np
import optax
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from flax.serialization import to_bytes
from helpers import (
    AGENTS,
    DQN,
    NUM_ACTIONS,
    SMALL_NETWORKS,
    flax_params,
    only,
    read_scalars,
    tiny,
    twin,
    write_teacher,
)

from cleanrl_utils.atari import StepResult
from cleanrl_utils.models import read_arrays
from cleanrl_utils.run import Run

LOG_EVERY = 20
STEPS_PER_SECOND = 1024  # by the recorder's clock; powers of two give exact quotients
UPDATES_PER_SECOND = 256
EVERY_SIZE = {"bf16": False, "checkpoint_minutes": 60, "seed": 7, "tau": 0.5}
EVERY_SIZE |= {"start_e": 0.9, "end_e": 0.2, "exploration_fraction": 0.8, "distill_coefficient": 0.75}
EVERY_SIZE |= {"warmup_updates": 14, "online_learning_rate": 2e-3, "final_learning_rate": 5e-4, "learning_rate": 1e-3}
EVERY_SIZE |= {"eval_episodes": 4, "teacher_eval_episodes": 2, "temperature": 0.5}
FEW_ENVIRONMENTS = {"num_envs": 2, "train_frequency": 5, "target_network_frequency": 6, "learning_starts": 33}
FEW_ENVIRONMENTS |= {"offline_steps": 21, "offline_eval_frequency": 8, "teacher_steps": 41, "total_timesteps": 110}
FEW_ENVIRONMENTS |= {"online_eval_frequency": 40, "buffer_size": 61, "capture_video": True}
MANY_ENVIRONMENTS = {"num_envs": 16, "train_frequency": 2, "target_network_frequency": 12, "learning_starts": 0}
MANY_ENVIRONMENTS |= {"offline_steps": 8, "offline_eval_frequency": 4, "teacher_steps": 140, "total_timesteps": 250}
MANY_ENVIRONMENTS |= {"online_eval_frequency": 50, "buffer_size": 140, "n_step": 2}


compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: compilations.append(event) if event.endswith("jaxpr_to_mlir_module_duration") else None
)


class Recorder:
    """A run whose calls are noted in their order.

    Each has its arguments by name, what it returned, the object ``of`` the method, and the phase: the stream of the
    environments that train, so that offline updates are in "teacher data", or the name of an evaluation.
    """

    def __init__(self, script: ModuleType, teacher: Path, **flags: Any):
        self.script = script
        self.has_teacher = script in (qdagger, qdagger_jax)
        self.args = twin(tiny(teacher, **flags), script)
        self.offline_steps = self.args.offline_steps if self.has_teacher else 0
        # The first online step with updates: at least one transition is in the replay buffer.
        starts = max(self.args.learning_starts, (self.args.n_step + 1) * self.args.num_envs)
        self.first_update = -(-starts // self.args.num_envs) * self.args.num_envs
        self.calls: list[SimpleNamespace] = []
        self.phase = ""
        self.clock = 0.0
        self.rng = np.random.default_rng(5)

    def main(self) -> None:
        """Run the script in this folder, with functions that take notes."""
        script = self.script
        learner = AGENTS[script]
        functions = [(learner, name) for name in ("q_values", "update", "update_target", "save")]
        functions += [(script.Replay, "add"), (script, "epsilon_greedy"), (Run, "save")]
        if self.has_teacher:
            functions.append((script.Teacher, "q_values"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.perf_counter", lambda: self.clock)
            patch.setattr("cleanrl_utils.device.available_cores", lambda: 1)
            patch.setattr("cleanrl_utils.run.summarise", lambda *args: None)  # it draws a figure
            patch.setattr("imageio.get_writer", mock.MagicMock())
            patch.setattr(script, "LOG_EVERY", LOG_EVERY)
            patch.setattr(script, "QNetwork", SMALL_NETWORKS[script])
            patch.setattr(script, "AtariEnvs", lambda *args, **flags: Noise(self, *args, **flags))
            patch.setattr(script, "play_episodes", functools.partial(self.play_episodes, script.play_episodes))
            for owner, name in functions:
                call = "checkpoint" if owner is Run else name
                patch.setattr(owner, name, self.noting(call, getattr(owner, name)))
            script.main(self.args)

    def note(self, call: str, **values: Any) -> None:
        """Note a call."""
        self.calls.append(SimpleNamespace(call=call, phase=self.phase, **values))

    def noting(self, call: str, function: Callable) -> Callable:
        """Return a function that notes its calls."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            values = inspect.signature(function).bind(*args, **kwargs).arguments
            before = len(compilations)
            returned = function(*args, **kwargs)
            values["compiled"] = len(compilations) - before
            if call == "update":
                values["steps"] = len(values.get("learning_rates", [0]))
                values["losses"] = {name: float(term) for name, term in returned._asdict().items()}
                self.clock += (self.phase == "teacher data") * values["steps"] / UPDATES_PER_SECOND
            self.note(call, of=values.pop("self", None), returned=returned, **values)
            return returned

        return noted

    def play_episodes(self, play: Callable, name: str, *args: Any) -> list[float]:
        """Note an evaluation and the phase in which it is made."""
        during = self.phase
        self.phase = name
        returns = play(name, *args)
        self.note("evaluate", returns=returns, during=during)
        self.phase = during
        return returns

    def of(self, call: str, *phases: str) -> list[SimpleNamespace]:
        """Return the calls of a function, in some phases only if they are given."""
        return [each for each in self.calls if each.call == call and each.phase in (phases or [each.phase])]


class Noise:
    """Environments of noise. They note calls, and an episode of an evaluation ends in its first step."""

    num_actions = NUM_ACTIONS

    def __init__(self, recorder: Recorder, env_id: str, num_envs: int, **flags: Any):
        self.recorder = recorder
        self.rng = recorder.rng
        self.num_envs = num_envs
        recorder.note("init_envs", flags={"env_id": env_id, "num_envs": num_envs, **flags})

    def reset(self, seed: int, stream: str, step: int = 0) -> np.ndarray:
        """Begin the phase of the stream if it is one of the training."""
        self.recorder.note("reset", seed=seed, stream=stream, step=step)
        self.stream = stream
        if stream in ("teacher data", "online"):
            self.recorder.phase = stream
            self.recorder.clock += 1000  # the speed is logged from here on
        self.observation = self.noise()
        return self.observation

    def noise(self) -> np.ndarray:
        """Draw observations."""
        return self.rng.integers(0, 256, (self.num_envs, 4, 84, 84), np.uint8)

    def send(self, action: np.ndarray) -> np.ndarray:
        """Take other actions than those chosen, as FIRE does where it replaces one."""
        taken = (action + self.rng.integers(1, NUM_ACTIONS, self.num_envs)) % NUM_ACTIONS
        self.recorder.note("send", chosen=action, taken=taken)
        return taken

    def recv(self) -> StepResult:
        """Return noise, rewards beyond ±1, and returns by which λ falls in the online phase."""
        n = self.num_envs
        is_training = self.stream in ("teacher data", "online")
        before = self.observation
        self.observation = self.noise()
        reset = (self.rng.random(n) < 0.25) | (not is_training)
        low, high = {"teacher": (100, 120), "random": (10, 30), "online": (10, 150)}.get(self.recorder.phase, (30, 50))
        returns = self.rng.integers(low, high, n).tolist()
        lengths = self.rng.integers(1000, 2000, n).tolist()
        result = StepResult(
            observation=self.observation,
            reward=self.rng.integers(-5, 6, n, dtype=np.int32),
            terminated=~reset & (self.rng.random(n) < 0.2),
            truncated=np.zeros(n, bool),
            reset=reset,
            episodes=[(env, returns[env], lengths[env]) for env in np.flatnonzero(reset).tolist()],
        )
        self.recorder.clock += is_training * n / STEPS_PER_SECOND
        self.recorder.note("recv", before=before, result=result)
        return result

    def step(self, action: np.ndarray) -> StepResult:
        """Call both."""
        self.send(action)
        return self.recv()

    def close(self) -> None:
        """Do nothing."""


# ==================== runs ====================


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a Q-network, and a policy of the same weights: its outputs are logits."""
    folder = tmp_path_factory.mktemp("teachers")
    q_network = write_teacher(folder) / f"{DQN}.cleanrl_model"
    layers = flax_params(read_arrays(q_network))["params"]
    layers["actor"] = layers.pop("Dense_1")
    policy = folder / "policy"
    policy.write_bytes(to_bytes({"params": layers}))
    return q_network, policy


RUNS = {f"{script.__name__}, {('few', 'many')[i]}": (script, i) for script in AGENTS for i in range(2)}


@pytest.fixture(scope="module", params=RUNS)
def run(
    request: pytest.FixtureRequest, teachers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Recorder:
    """Run a script with small networks; few environments have a Q-network as teacher, many a policy."""
    script, is_policy = RUNS[request.param]
    size = MANY_ENVIRONMENTS if is_policy else FEW_ENVIRONMENTS
    recorder = Recorder(script, teachers[is_policy], **EVERY_SIZE, **size)
    recorder.is_policy = is_policy
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recorder.main()
    recorder.directory = only((folder / "runs").iterdir())
    return recorder


@pytest.mark.parametrize(("script", "jax_script"), [(qdagger, qdagger_jax), (dqn_atari, dqn_atari_jax)])
def test_main_is_one_text(script: ModuleType, jax_script: ModuleType) -> None:
    """What the libraries force apart is above it."""
    assert inspect.getsource(script.main) == inspect.getsource(jax_script.main)


# ==================== what is stored ====================


def test_replay_holds_what_happened(run: Recorder, teachers: tuple[Path, Path]) -> None:
    """Each step has the observation before it, the action that was taken, its result, and the teacher's Q-values.

    Each phase has a buffer of its own, of whole steps of all environments.
    """
    sizes = {"teacher data": run.args.teacher_steps} if run.has_teacher else {}
    for phase, size in (sizes | {"online": run.args.buffer_size}).items():
        (replay,) = {add.of for add in run.of("add", phase)}
        assert replay.length == size // run.args.num_envs
    calls = [run.of(call, "teacher data", "online") for call in ("add", "recv", "send")]
    for add, recv, send in zip(*calls, strict=True):
        assert add.phase == recv.phase == send.phase
        np.testing.assert_array_equal(add.observation, recv.before)
        np.testing.assert_array_equal(add.action, send.taken)
        assert add.result is recv.result
    if run.has_teacher:
        network = qdagger.TeacherNetwork(NUM_ACTIONS)
        network.load_state_dict(torch.load(teachers[0]))
        with torch.no_grad():
            outputs = network(torch.from_numpy(np.concatenate([add.observation for add in calls[0]])))
        q_values = outputs * (run.args.temperature if run.is_policy else 1.0)  # a policy's logits are Q-values / τ
        found = np.concatenate([add.teacher_q_values for add in calls[0]])
        np.testing.assert_allclose(found, q_values, rtol=0, atol=1e-4)


# ==================== environments ====================


def test_environments(run: Recorder) -> None:
    """All are of the same game. Resets have the run's seed, the stream of their use, and the number of the episode."""
    for i, each in enumerate(run.of("init_envs")):
        assert each.flags["env_id"] == run.args.env_id
        assert each.flags["num_envs"] == (1 if i else run.args.num_envs)
    expected = [("", "teacher data", 0), ("teacher data", "online", 0)] if run.has_teacher else [("", "online", 0)]
    for each in run.of("evaluate"):
        expected += [(each.phase, "evaluation", episode) for episode in range(len(each.returns))]
        expected += [(each.phase, "video", 0)] * 2 * run.args.capture_video  # the episode, and the same in colour
    assert sorted((each.phase, each.stream, each.step) for each in run.of("reset")) == sorted(expected)
    assert {each.seed for each in run.of("reset")} == {run.args.seed}


# ==================== how actions are chosen ====================


def test_exploration(run: Recorder) -> None:
    """The teacher explores in its data, the student online, with the run's seed; all that is chosen is sent."""
    args = run.args
    steps = range(0, args.total_timesteps, args.num_envs)
    schedules = {"online": [(args.exploration_fraction * args.total_timesteps, run.offline_steps + i) for i in steps]}
    if run.has_teacher:
        steps = range(0, args.teacher_steps - args.num_envs + 1, args.num_envs)
        schedules["teacher data"] = [(args.teacher_steps, step) for step in steps]
    for phase, schedule in schedules.items():
        expected = [args.start_e + (args.end_e - args.start_e) * min(step / duration, 1) for duration, step in schedule]
        chosen = run.of("epsilon_greedy", phase)
        assert [choice.epsilon for choice in chosen] == pytest.approx(expected)
        assert len(set(expected)) > 4
        for choice, send in zip(chosen, run.of("send", phase), strict=True):
            np.testing.assert_array_equal(send.chosen, choice.returned)
    rng = np.random.default_rng(args.seed)
    for choice in run.of("epsilon_greedy", *schedules):
        temperature = [choice.temperature] if run.has_teacher else []
        expected = run.script.epsilon_greedy(choice.q_values, choice.epsilon, rng, *temperature)
        np.testing.assert_array_equal(choice.returned, expected)
    assert run.of("epsilon_greedy", "online")[-1].epsilon == pytest.approx(args.end_e)


def test_policies(run: Recorder) -> None:
    """The teacher acts in its evaluation and data, sampling if it is a policy; elsewhere the student, greedily."""
    received = {phase: iter(run.of("recv", phase)) for phase in ("teacher data", "online")}
    for computed, choice in zip(run.calls, run.calls[1:], strict=False):
        if choice.call == "epsilon_greedy":
            np.testing.assert_array_equal(choice.q_values, computed.returned)
            if choice.phase in received:
                np.testing.assert_array_equal(computed.observation, next(received[choice.phase]).before)
            by_teacher = run.has_teacher and choice.phase in ("teacher", "random", "teacher data")
            assert type(computed.of) is (run.script.Teacher if by_teacher else AGENTS[run.script])
            if run.has_teacher:
                assert choice.temperature == (run.args.temperature if by_teacher and run.is_policy else 0.0)


# ==================== evaluations ====================


def multiples(every: int, start: int, end: int) -> int:
    """Count the multiples of ``every`` in (start, end]."""
    return sum(step % every == 0 for step in range(start + 1, end + 1))


def test_evaluations(run: Recorder) -> None:
    """Each is made when it is due, at its ε, and after its model and a checkpoint are saved."""
    args = run.args
    found = []
    updates = 0
    for each in run.calls:
        if each.call == "update":
            updates += each.steps
        elif each.call == "evaluate":
            choices = run.of("epsilon_greedy", each.phase)
            assert len(choices) == 1 + args.capture_video
            assert {choice.epsilon for choice in choices} == {1.0 if each.phase == "random" else args.end_e}
            found.append((each.phase, len(each.returns), each.during, updates))
        elif each.call == "save":
            found.append(each.path.name)
        elif each.call == "checkpoint":
            found.append(f"checkpoint with {type(vars(each).get('replay')).__name__}")
    n = args.num_envs
    due = []
    expected: list[Any] = ["checkpoint with NoneType"]
    if run.has_teacher:
        expected += [(name, args.teacher_eval_episodes, "", 0) for name in ("teacher", "random")]
        expected.append("checkpoint with Replay")  # the teacher data
        steps = {*range(0, run.offline_steps, args.offline_eval_frequency), run.offline_steps} - {0}
        due += [(f"offline {i}", "teacher data", i) for i in sorted(steps)]
        for i in range(n, args.total_timesteps, n):
            if multiples(args.online_eval_frequency, i - n, i):
                updates_before = run.offline_steps + multiples(args.train_frequency, run.first_update, i)
                due.append((f"online {i}", "online", updates_before))
    for name, during, updates_before in due:
        expected.append(f"{args.exp_name}-{name.replace(' ', '-')}.cleanrl_model")
        expected += ["checkpoint with Replay", (name, args.eval_episodes, during, updates_before)]
        if name == f"offline {run.offline_steps}":
            expected.append("checkpoint with NoneType")  # the teacher's replay buffer is not needed any more
    expected += [f"{args.exp_name}.cleanrl_model", "checkpoint with NoneType"]
    expected.append(("final", args.eval_episodes, "online", updates))
    assert found == expected


# ==================== updates ====================


def test_updates_that_are_due(run: Recorder) -> None:
    """Each phase has its gradient steps and target updates in this order, whatever ``num_envs`` is.

    They are steps of the optimizer, with transitions of the newest replay buffer.
    """
    args = run.args
    n = args.num_envs
    found = []
    replay = None
    for each in run.calls:
        if each.call == "update":
            found += ["gradient step"] * each.steps
            assert each.replay is replay
            learner = each.of
        elif each.call == "update_target":
            found.append(f"target {each.tau}")
        elif each.call == "add":
            found.append(each.phase)
            replay = each.of
    expected = []
    if run.has_teacher:
        expected += ["teacher data"] * (args.teacher_steps // n)
        for i in range(1, args.offline_steps + 1):
            expected += ["gradient step"] + ["target 0.5"] * (i % args.target_network_frequency == 0)
        expected.append("target 1.0")  # the online phase begins with an up-to-date target network
    for step in range(0, args.total_timesteps, n):
        if step >= run.first_update:
            expected += ["gradient step"] * multiples(args.train_frequency, step, step + n)
            expected += ["target 0.5"] * multiples(args.target_network_frequency, step, step + n)
        expected.append("online")
    assert found == expected
    if isinstance(learner.optimizer, torch.optim.Optimizer):
        counts = [state["step"] for state in learner.optimizer.state.values()]
    else:
        counts = [count for _, count in optax.tree.get_all_with_path(learner.state.optimizer_state, "count")]
    assert {int(count) for count in counts} == {found.count("gradient step")}


def test_nothing_is_compiled_again(run: Recorder) -> None:
    """JAX compiles each kind of call once in a phase, for each batch size, since updates keep the types of arrays."""
    found: dict[Any, list[int]] = {}
    for each in run.calls:
        if each.call in ("add", "q_values", "update", "update_target"):
            batch_size = len(vars(each).get("observation", ()))
            kind = each.call, each.phase, type(each.of), batch_size, vars(each).get("steps")
            found.setdefault(kind, []).append(each.compiled)
    assert max(np.count_nonzero(compiled) for compiled in found.values()) <= 1
    assert any(map(any, found.values())) == ("jax" in run.script.__name__)


def distill_coefficients(run: Recorder) -> list[float]:
    """Return λ in each step of the online phase."""
    teacher_return, random_return = (np.mean(run.of("evaluate", name)[0].returns) for name in ("teacher", "random"))
    found = []
    recent = []
    for recv in run.of("recv", "online"):
        share = (teacher_return - np.mean(recent[-10:])) / (teacher_return - random_return) if recent[9:] else 1.0
        found.append(run.args.distill_coefficient * min(max(share, 0.0), 1.0))
        recent += [episodic_return for _, episodic_return, _ in recv.result.episodes]
    assert len(set(found)) > 4
    return found


def test_coefficients_of_updates(run: Recorder) -> None:
    """λ is constant offline and annealed online; the learning rates are those of the updates and their λ."""
    if not run.has_teacher:
        return
    online = distill_coefficients(run)
    step = 0
    updates = 0
    for each in run.calls:
        step += (each.call, each.phase) == ("add", "online")
        if each.call == "update":
            coefficient = online[step] if each.phase == "online" else run.args.distill_coefficient
            assert each.distill_coefficient == pytest.approx(coefficient)
            losses = each.losses
            assert losses["loss"] == pytest.approx(losses["td_loss"] + coefficient * losses["distill_loss"], rel=1e-4)
            numbers = range(updates, updates + each.steps)
            rates = [
                run.script.learning_rate_at(number, run.args, coefficient / run.args.distill_coefficient)
                for number in numbers
            ]
            assert each.learning_rates == pytest.approx(rates, rel=1e-5)
            updates += each.steps


# ==================== what is logged ====================


def test_curves(run: Recorder) -> None:
    """The curves have the points of the run: unclipped returns, lengths, ε and λ as used, the last losses."""
    args = run.args
    n = args.num_envs
    offline_steps = run.offline_steps
    expected = {}

    def log(tag: str, value: float, step: int) -> None:
        expected.setdefault(tag, []).append((step, pytest.approx(value, rel=1e-6)))

    step = 0  # of the online phase
    updates = 0
    losses = {}  # of the last update in the online phase
    if run.has_teacher:
        coefficients = distill_coefficients(run)
        log("charts/teacher/SPS", STEPS_PER_SECOND, 0)
    for each in run.calls:
        if each.call == "evaluate":
            name, _, number = each.phase.partition(" ")
            at = int(number or 0) + {"online": offline_steps, "final": offline_steps + step}.get(name, 0)
            log(f"charts/{name}/avg_episodic_return", np.mean(each.returns), at)
            for i, episodic_return in enumerate(each.returns if name == "final" else []):
                log("eval/episodic_return", episodic_return, at + i)
        elif each.call == "update":
            updates += each.steps
            if each.phase == "online":
                losses = each.losses
            elif updates % LOG_EVERY == 0:
                for tag, name in {"loss": "loss", "q_loss": "td_loss", "distill_loss": "distill_loss"}.items():
                    log(f"charts/offline/{tag}", each.losses[name], updates)
                log("charts/offline/updates_per_second", UPDATES_PER_SECOND, updates)
        elif each.call == "epsilon_greedy" and each.phase == "online":
            epsilon = each.epsilon
        elif each.call == "recv" and each.phase == "online":
            if multiples(LOG_EVERY, step, step + n):
                log("charts/SPS", STEPS_PER_SECOND, offline_steps + step)
                log("charts/epsilon", epsilon, offline_steps + step)
                if run.has_teacher:
                    log("charts/distill_coeff", coefficients[step // n], offline_steps + step)
                for name, term in losses.items():
                    log(f"losses/{name}", term, offline_steps + step)
            for env, episodic_return, length in each.result.episodes:
                log("charts/episodic_return", episodic_return, offline_steps + step + env)
                log("charts/episodic_length", length, offline_steps + step + env)
            step += n
    assert read_scalars(run.directory) == expected
