"""What ``main`` does: each script runs once per set of sizes, and a recorder notes the calls that it makes.

The environments return noise, so that each step differs from all others. Evaluations return numbers drawn at random.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from flax.serialization import to_bytes
from helpers import (
    DQN,
    GAME,
    NETWORKS,
    NUM_ACTIONS,
    SMALL_NETWORKS,
    Scalars,
    flax_params,
    only,
    read_scalars,
    tiny,
    twin,
    write_teacher,
)

from cleanrl_utils import atari
from cleanrl_utils.atari import AtariEnvs, Step
from cleanrl_utils.models import read_arrays

LOG_EVERY = 20
STEPS_PER_SECOND, UPDATES_PER_SECOND = 1024, 256  # by the recorder's clock; powers of two give exact quotients
EVERY_SIZE = {"repeat_action_probability": 0.125, "bf16": False, "checkpoint_minutes": 0, "seed": 7, "tau": 0.5}
EVERY_SIZE |= {"start_e": 0.9, "end_e": 0.2, "exploration_fraction": 0.8, "distill_coefficient": 0.75}
EVERY_SIZE |= {"warmup_updates": 14, "online_learning_rate": 2e-3, "final_learning_rate": 5e-4, "learning_rate": 1e-3}
EVERY_SIZE |= {"eval_episodes": 3, "teacher_eval_episodes": 2, "temperature": 0.5}
FEW_ENVIRONMENTS = {"num_envs": 2, "train_frequency": 5, "target_network_frequency": 6, "learning_starts": 33}
FEW_ENVIRONMENTS |= {"offline_steps": 21, "offline_eval_frequency": 8, "teacher_steps": 41, "total_timesteps": 110}
FEW_ENVIRONMENTS |= {"online_eval_frequency": 40, "buffer_size": 61}
MANY_ENVIRONMENTS = {"num_envs": 16, "train_frequency": 2, "target_network_frequency": 12, "learning_starts": 60}
MANY_ENVIRONMENTS |= {"offline_steps": 8, "offline_eval_frequency": 4, "teacher_steps": 140, "total_timesteps": 200}
MANY_ENVIRONMENTS |= {"online_eval_frequency": 50, "buffer_size": 140, "n_step": 2}
SIZES = {"few environments": FEW_ENVIRONMENTS, "many environments": MANY_ENVIRONMENTS}


def bound(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, with the defaults of those that are missing."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments


class Recorder:
    """A run whose calls are noted in their order, each with its phase: "offline", "online" or an evaluation's name."""

    def __init__(self, script: Any, args: Any, q_of_teacher: Callable[[np.ndarray], np.ndarray] | None):
        self.script = script
        self.is_jax = hasattr(script, "jax")
        self.args = args
        self.q_of_teacher = q_of_teacher  # None in DQN
        self.calls: list[SimpleNamespace] = []
        self.phase = ""
        self.next_phases = ["offline", "online"] if q_of_teacher else ["online"]
        self.clock = 0.0
        self.gradient_steps = 0
        self.observation = np.zeros(0)
        self.state: Any = None  # of the JAX scripts, the newest
        self.rng = np.random.default_rng(5)
        names = ("epsilon_greedy", "make_update", "update_target", "play_episodes")
        self.functions = {name: getattr(script, name) for name in names}
        self.make_envs = AtariEnvs.__init__
        self.add_to_replay = script.Replay.add
        self.scalars: Scalars = {}

    def main(self, folder: Path) -> None:
        """Run the script in a folder, with functions that take notes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr("time.perf_counter", lambda: self.clock)
            patch.setattr("cleanrl_utils.device.available_cores", lambda: 1)
            patch.setattr(self.script, "summarise", lambda *args: None, raising=False)  # it draws a figure
            patch.setattr(self.script, "LOG_EVERY", LOG_EVERY)
            patch.setattr(self.script, "QNetwork", SMALL_NETWORKS[self.script])
            for name in self.functions:
                patch.setattr(self.script, name, getattr(self, name))
            patch.setattr(self.script.Replay, "add", lambda *args, **kwargs: self.add(*args, **kwargs))
            patch.setattr(AtariEnvs, "__init__", lambda *args, **kwargs: self.init_envs(*args, **kwargs))
            patch.setattr(AtariEnvs, "reset", lambda envs, seed=None: self.reset(envs))
            patch.setattr(AtariEnvs, "send", lambda envs, action: self.send(envs, action))
            patch.setattr(AtariEnvs, "recv", lambda envs: self.recv(envs))
            patch.setattr(AtariEnvs, "close", lambda envs: None)
            self.script.main(self.args)
        self.scalars = read_scalars(only((folder / "runs").iterdir()))

    def note(self, call: str, **values: Any) -> None:
        """Note a call."""
        self.calls.append(SimpleNamespace(call=call, phase=self.phase, **values))

    def of(self, call: str, *phases: str) -> list[SimpleNamespace]:
        """Return the calls of a name in some phases."""
        return [each for each in self.calls if each.call == call and each.phase in phases]

    def init_envs(self, *args: Any, **kwargs: Any) -> None:
        """Note the flags; no emulator is started."""
        flags = bound(self.make_envs, args, kwargs)
        envs = flags.pop("self")
        envs.num_envs = flags["num_envs"]
        envs.num_actions = NUM_ACTIONS
        self.note("init_envs", flags=flags)

    def reset(self, envs: AtariEnvs) -> np.ndarray:
        """Begin the next phase."""
        self.phase = self.next_phases.pop(0)
        self.observation = self.noise(envs.num_envs)
        return self.observation

    def send(self, envs: AtariEnvs, action: np.ndarray) -> np.ndarray:
        """Take other actions than those chosen, as FIRE does where it replaces one."""
        taken = (action + self.rng.integers(1, NUM_ACTIONS, envs.num_envs)) % NUM_ACTIONS
        self.note("send", chosen=action, taken=taken)
        return taken

    def recv(self, envs: AtariEnvs) -> Step:
        """Return noise, rewards beyond ±1, and episodes whose returns make λ fall."""
        n = envs.num_envs
        before = self.observation
        self.observation = self.noise(n)
        reset = self.rng.random(n) < 0.25
        returns = self.rng.integers(10, 150, n).tolist()
        lengths = self.rng.integers(1000, 2000, n).tolist()
        result = Step(
            observation=self.observation,
            reward=self.rng.integers(-5, 6, n, dtype=np.int32),
            terminated=~reset & (self.rng.random(n) < 0.2),
            truncated=np.zeros(n, bool),
            reset=reset,
            episodes=[(env, returns[env], lengths[env]) for env in np.flatnonzero(reset).tolist()],
        )
        self.clock += n / STEPS_PER_SECOND
        self.note("recv", before=before, result=result)
        return result

    def noise(self, num_envs: int) -> np.ndarray:
        """Draw observations."""
        return self.rng.integers(0, 256, (num_envs, 4, 84, 84), np.uint8)

    def epsilon_greedy(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Note the policy, and the student's Q-values for the newest observation."""
        choose = self.functions["epsilon_greedy"]
        policy = {"temperature": 0.0, **bound(choose, args, kwargs)}  # DQN's has no temperature
        action = choose(*args, **kwargs)
        self.note("choose", **policy, action=action, seen=self.observation, q_of_student=self.q_of_student())
        return action

    def q_of_student(self) -> np.ndarray | None:
        """Compute the student's Q-values for the newest observation; None before its first update in JAX."""
        if self.state is not None:
            return np.asarray(self.apply(self.state.params, self.observation))
        if self.is_jax or not hasattr(self, "made"):
            return None
        with torch.no_grad():
            return self.made["q_network"](torch.tensor(self.observation)).numpy()

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Note what is added to a replay buffer."""
        values = bound(self.add_to_replay, args, kwargs)
        self.replay = values.pop("self")
        result = values.pop("result")
        arrays = {name: np.asarray(value).copy() for name, value in values.items()}
        self.note("add", replay=self.replay, result=result, **arrays)
        self.add_to_replay(*args, **kwargs)

    def make_update(self, *args: Any, **kwargs: Any) -> Callable:
        """Let updates note the gradient steps that the optimizer counts, the learning rate, the data and the losses."""
        make = self.functions["make_update"]
        self.made = bound(make, args, kwargs)
        if self.is_jax:
            self.apply = jax.jit(self.made["q_network"].apply)
        update = make(*args, **kwargs)

        def noted_update(*args: Any, **kwargs: Any) -> Any:
            values = {**self.made, **bound(update, args, kwargs)}
            data = (values["ring"] is self.replay.ring, values["low"], values["high"])
            expected_data = (True, *self.replay.window)
            if self.gradient_steps == 0:  # the target network begins as a copy
                if self.is_jax:
                    pairs = zip(*map(jax.tree.leaves, values["state"][:2]), strict=True)
                else:
                    pairs = zip(values["q_network"].parameters(), values["target_network"].parameters(), strict=True)
                assert all(bool((array == copied).all()) for array, copied in pairs)
            result = update(*args, **kwargs)
            losses = result
            if self.is_jax:
                self.state, losses = result
                counts = [count for _, count in optax.tree.get_all_with_path(self.state.optimizer_state, "count")]
                learning_rate = getattr(self.state.optimizer_state, "hyperparams", {}).get("learning_rate")
            else:
                counts = [state["step"] for state in self.made["optimizer"].state.values()]
                learning_rate = self.made["optimizer"].param_groups[0]["lr"]
            learning_rate = learning_rate and float(learning_rate)
            new = max(map(int, counts)) - self.gradient_steps
            self.gradient_steps += new
            if self.phase == "offline":
                self.clock += new / UPDATES_PER_SECOND
            terms = {name: float(term) for name, term in losses._asdict().items()}
            self.note("update", new=new, total=self.gradient_steps, learning_rate=learning_rate, losses=terms)
            assert data == expected_data
            return result

        return noted_update

    def update_target(self, *args: Any, **kwargs: Any) -> Any:
        """Note the fraction."""
        move = self.functions["update_target"]
        values = bound(move, args, kwargs)
        self.note("update_target", tau=values["tau"])
        result = move(*args, **kwargs)
        if self.is_jax:
            self.state = result
        else:
            networks = (values["target_network"], values["q_network"])
            assert networks == (self.made["target_network"], self.made["q_network"])
            assert networks[0] is not networks[1]
        return result

    def play_episodes(self, *args: Any, **kwargs: Any) -> list[float]:
        """Let the policy act once; return higher returns for the teacher than for the random policy."""
        values = bound(self.functions["play_episodes"], args, kwargs)
        name = values["name"]
        episodes = values["episodes"]
        if self.phase == "":  # not in the training, whose speed is logged
            self.clock += 1000
        during = self.phase
        observation = self.observation
        self.phase = name
        self.observation = self.noise(2)
        values["make_envs"](num_envs=1, seed=values["seed"])
        values["act"](self.observation)
        returns = (self.rng.integers(0, 20, episodes) + {"teacher": 100, "random": 10}.get(name, 30)).tolist()
        self.note("evaluate", episodes=episodes, returns=returns, during=during, total=self.gradient_steps)
        self.phase = during
        self.observation = observation
        return returns


# ==================== runs ====================


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a Q-network, and a policy of the same weights: its outputs are logits."""
    q_network = write_teacher(tmp_path_factory.mktemp("q_network"))
    layers = flax_params(read_arrays(q_network / f"{DQN}.cleanrl_model"))["params"]
    layers["actor"] = layers.pop("Dense_1")
    policy = tmp_path_factory.mktemp("policy") / "policy"
    policy.write_bytes(to_bytes({"params": layers}))
    return {"few environments": q_network, "many environments": policy}


def teacher_network(path: Path) -> torch.nn.Module:
    """Load the weights of :func:`teachers` without the scripts' function."""
    network = qdagger.TeacherNetwork(NUM_ACTIONS)
    network.load_state_dict(torch.load(path / f"{DQN}.cleanrl_model"))
    return network


RUNS = {f"{script.__name__}, {sizes}": (script, sizes) for script in NETWORKS for sizes in SIZES}


@pytest.fixture(scope="module", params=RUNS)
def run(
    request: pytest.FixtureRequest, teachers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Recorder:
    """Run a script with small networks."""
    script, sizes = RUNS[request.param]
    args = twin(tiny(teachers[sizes], **EVERY_SIZE, **SIZES[sizes]), script)
    if hasattr(args, "eval_frequency"):  # in DQN
        args.eval_frequency = SIZES[sizes]["online_eval_frequency"]
    q_of_teacher = None
    if script in (qdagger, qdagger_jax):
        network = teacher_network(teachers["few environments"])
        scale = args.temperature if sizes == "many environments" else 1.0  # Q_T stands for τ times a policy's logits

        @torch.no_grad()
        def q_of_teacher(observation: np.ndarray) -> np.ndarray:
            return scale * network(torch.tensor(observation)).numpy()

    recorder = Recorder(script, args, q_of_teacher)
    recorder.main(tmp_path_factory.mktemp("run"))
    return recorder


# ==================== what is stored ====================


def test_replay_holds_what_happened(run: Recorder) -> None:
    """Each step has the observation before it, the action that was taken, its result, and the teacher's Q-values."""
    added = run.of("add", "offline", "online")
    received = run.of("recv", "offline", "online")
    sent = run.of("send", "offline", "online")
    assert len(added) == len(received) == len(sent) > 0
    for add, recv, send in zip(added, received, sent, strict=True):
        assert add.phase == recv.phase == send.phase
        np.testing.assert_array_equal(add.observation, recv.before)
        np.testing.assert_array_equal(add.action, send.taken)
        assert add.result is recv.result
    if run.q_of_teacher:
        q_values = run.q_of_teacher(np.concatenate([add.observation for add in added]))
        np.testing.assert_allclose(np.concatenate([add.teacher_q_values for add in added]), q_values, rtol=0, atol=1e-4)


def test_sizes_of_phases_and_replay_buffers(run: Recorder) -> None:
    """Both are rounded to whole steps of all environments; the online phase has a buffer of its own."""
    n = run.args.num_envs
    sizes = {"online": (-(-run.args.total_timesteps // n), run.args.buffer_size // n)}
    if run.q_of_teacher:
        sizes["offline"] = (run.args.teacher_steps // n,) * 2
    for phase, (steps, length) in sizes.items():
        added = run.of("add", phase)
        assert len(added) == steps
        assert {id(add.replay) for add in added} == {id(added[0].replay)}
        assert added[0].replay.length == length
    assert len({id(add.replay) for add in run.of("add", *sizes)}) == len(sizes)


def test_environments_have_the_flags(run: Recorder) -> None:
    """Training and evaluations play the same game, with other seeds."""
    game = {name: getattr(run.args, name) for name in ("env_id", "repeat_action_probability")}
    training, *evaluations = [each.flags for each in run.calls if each.call == "init_envs"]
    assert training == {**game, "num_envs": run.args.num_envs, "seed": run.args.seed, "images": {}}
    for flags in evaluations:
        assert flags == {**game, "num_envs": 1, "seed": run.args.seed + 1000, "images": {}}


# ==================== how actions are chosen ====================


def anneal(args: Any, duration: float, step: int) -> float:
    """Compute ε."""
    return args.start_e + (args.end_e - args.start_e) * min(step / duration, 1)


def test_exploration(run: Recorder) -> None:
    """The teacher explores in its data, the student online; all that is chosen is sent."""
    args = run.args
    offline_steps = args.offline_steps if run.q_of_teacher else 0
    duration = args.exploration_fraction * args.total_timesteps
    steps = range(0, args.total_timesteps, args.num_envs)
    schedules = {"online": [anneal(args, duration, offline_steps + step) for step in steps]}
    if run.q_of_teacher:
        steps = range(0, args.teacher_steps - args.num_envs + 1, args.num_envs)
        schedules["offline"] = [anneal(args, args.teacher_steps, step) for step in steps]
    for phase, schedule in schedules.items():
        chosen = run.of("choose", phase)
        assert [choice.epsilon for choice in chosen] == pytest.approx(schedule)
        assert len(set(schedule)) > 4
        for choice, send in zip(chosen, run.of("send", phase), strict=True):
            np.testing.assert_array_equal(choice.action, send.chosen)
    assert min(schedules["online"]) == pytest.approx(args.end_e)


def test_policies(run: Recorder) -> None:
    """The teacher acts in its evaluation and data, sampling if it is a policy; elsewhere the student, greedily."""
    followed = 0
    for choice in run.calls:
        if choice.call != "choose" or choice.phase == "random":
            continue
        if choice.phase in ("teacher", "offline"):
            q_values = run.q_of_teacher(choice.seen)
            temperature = run.args.temperature if run.args.num_envs == MANY_ENVIRONMENTS["num_envs"] else 0.0
        else:
            q_values = choice.q_of_student
            temperature = 0.0
        assert choice.temperature == temperature
        if q_values is not None:
            np.testing.assert_allclose(choice.q_values, q_values, rtol=0, atol=1e-4)
            followed += choice.phase not in ("teacher", "offline")
    assert followed > 10


# ==================== evaluations ====================


def multiples(every: int, start: int, end: int) -> int:
    """Count the multiples of ``every`` in (start, end]."""
    return sum(step % every == 0 for step in range(start + 1, end + 1))


def test_evaluations(run: Recorder) -> None:
    """Each is made when it is due, at its ε: 1 for the random policy, ``end_e`` for all others."""
    args = run.args
    found = [(each.phase, each.episodes, each.during, each.total) for each in run.calls if each.call == "evaluate"]
    expected = []
    offline_steps = 0
    if run.q_of_teacher:
        expected += [(name, args.teacher_eval_episodes, "", 0) for name in ("teacher", "random")]
        offline_steps = args.offline_steps
        due = [i for i in range(1, offline_steps) if i % args.offline_eval_frequency == 0] + [offline_steps]
        expected += [(f"offline {i}", args.eval_episodes, "offline", i) for i in due]
    for step in online_evaluations(args):
        updates = offline_steps + multiples(args.train_frequency, first_step_with_updates(args), step)
        expected.append((f"online {step}", args.eval_episodes, "online", updates))
    expected.append(("final", args.eval_episodes, "online", run.gradient_steps))
    assert found == expected
    for name, *_ in found:
        (choice,) = run.of("choose", name)
        assert choice.epsilon == (1.0 if name == "random" else args.end_e)


def online_evaluations(args: Any) -> list[int]:
    """Return the steps of the online phase before which the student is evaluated."""
    every = getattr(args, "eval_frequency", None) or args.online_eval_frequency
    n = args.num_envs
    return [step for step in range(n, args.total_timesteps, n) if multiples(every, step - n, step)]


def first_step_with_updates(args: Any) -> int:
    """Return the first step of all environments that reaches ``learning_starts``."""
    return -(-args.learning_starts // args.num_envs) * args.num_envs


# ==================== updates ====================


def test_updates_that_are_due(run: Recorder) -> None:
    """Each phase has its gradient steps and target updates in this order, whatever ``num_envs`` is."""
    args = run.args
    n = args.num_envs
    found = []
    for each in run.calls:
        if each.call == "update":
            found += ["gradient step"] * each.new
        elif each.call == "update_target":
            found.append(f"target {each.tau}")
        elif each.call == "add":
            found.append(each.phase)
    expected = []
    if run.q_of_teacher:
        expected += ["offline"] * (args.teacher_steps // n)
        for i in range(1, args.offline_steps + 1):
            expected += ["gradient step"] + ["target 0.5"] * (i % args.target_network_frequency == 0)
        expected.append("target 1.0")  # the online phase begins with an up-to-date target network
    for step in range(0, args.total_timesteps, n):
        if step >= args.learning_starts:
            expected += ["gradient step"] * multiples(args.train_frequency, step, step + n)
            expected += ["target 0.5"] * multiples(args.target_network_frequency, step, step + n)
        expected.append("online")
    assert found == expected


def distill_coefficients(run: Recorder) -> list[float]:
    """Compute λ in each step of the online phase."""
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
    """λ is constant offline and annealed online; the learning rate is that of the update and its λ."""
    if not run.q_of_teacher:
        return
    online = distill_coefficients(run)
    step = 0
    for each in run.calls:
        step += (each.call, each.phase) == ("add", "online")
        if each.call == "update":
            coefficient = online[step] if each.phase == "online" else run.args.distill_coefficient
            losses = each.losses
            assert losses["loss"] == pytest.approx(losses["td_loss"] + coefficient * losses["distill_loss"], rel=1e-4)
            rate = run.script.learning_rate_at(each.total - 1, coefficient, run.args)
            assert each.learning_rate == pytest.approx(rate, rel=1e-5)


# ==================== what is logged ====================


def test_curves(run: Recorder) -> None:
    """The curves have the points of the run: unclipped returns, lengths, ε and λ as used, the last losses."""
    args = run.args
    n = args.num_envs
    expected = {}

    def log(tag: str, value: float, step: int) -> None:
        expected.setdefault(tag, []).append((step, pytest.approx(value, rel=1e-6)))

    offline_steps = 0
    step = 0  # of the online phase
    updates = 0  # of the online phase
    updates_per_log = LOG_EVERY // args.train_frequency
    if run.q_of_teacher:
        offline_steps = args.offline_steps
        coefficients = distill_coefficients(run)
        log("charts/teacher/SPS", STEPS_PER_SECOND, 0)
    for each in run.calls:
        if each.call == "evaluate":
            name, _, number = each.phase.partition(" ")
            if name == "final":
                for i, episodic_return in enumerate(each.returns):
                    log("eval/episodic_return", episodic_return, offline_steps + step + i)
            else:
                at = int(number or 0) + (offline_steps if name == "online" else 0)
                log(f"charts/{name}/avg_episodic_return", np.mean(each.returns), at)
        elif each.call == "update":
            losses = each.losses
            if each.phase == "offline" and each.total % LOG_EVERY == 0:
                for tag, name in {"loss": "loss", "q_loss": "td_loss", "distill_loss": "distill_loss"}.items():
                    log(f"charts/offline/{tag}", losses[name], each.total)
                log("charts/offline/updates_per_second", UPDATES_PER_SECOND, each.total)
            updates += each.new * (each.phase == "online")
        elif each.call == "choose" and each.phase == "online":
            epsilon = each.epsilon
            updates_before = updates
        elif each.call == "recv" and each.phase == "online":
            if multiples(LOG_EVERY, step, step + n):
                log("charts/SPS", STEPS_PER_SECOND, offline_steps + step)
                log("charts/epsilon", epsilon, offline_steps + step)
                if run.q_of_teacher:
                    log("charts/distill_coeff", coefficients[step // n], offline_steps + step)
            if multiples(updates_per_log, updates_before, updates):
                for name, term in losses.items():
                    log(f"losses/{name}", term, offline_steps + step)
            for env, episodic_return, length in each.result.episodes:
                log("charts/episodic_return", episodic_return, offline_steps + step + env)
                log("charts/episodic_length", length, offline_steps + step + env)
            step += n
    assert run.scalars == expected


def test_episodes_end_after_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode may have 108,000 frames (Machado et al., 2018)."""
    options = {}

    def make(rom: str, num_envs: int, **given: Any) -> Any:
        options.update(given)
        return atari_vector_env(rom, num_envs, **given)

    atari_vector_env = atari.AtariVectorEnv
    monkeypatch.setattr(atari, "AtariVectorEnv", make)
    AtariEnvs(GAME, 1, 1).close()
    assert options["max_num_frames_per_episode"] == 30 * 60 * 60
