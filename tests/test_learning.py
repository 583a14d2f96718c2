"""Learning in a toy task: a student comes to act as its teacher, and without a teacher it finds the best actions.

The updates are called here and not by ``main``: so the floor is on the actions in all states, and does not depend on
the returns of a few episodes. What ``main`` calls, and when, is tested in test_main.py.
"""

from types import ModuleType
from typing import Any

import dqn_atari
import dqn_atari_jax
import flax.linen as nn
import jax
import numpy as np
import pytest
import qdagger_dqn_atari_impalacnn as qdagger
import qdagger_dqn_atari_jax_impalacnn as qdagger_jax
import torch
from helpers import AGENTS, twin

from cleanrl_utils.atari import StepResult

NUM_ACTIONS = 4
NUM_ENVS = 8
COLOURS = 4
LENGTH = 4  # rooms of a corridor
STATES = COLOURS * LENGTH
FORWARD = 0
EXIT = 1  # the other actions go back to the first room
EXIT_REWARD = 0.3
GAMMA = 0.8  # the first room is worth 0.8³, which is more than the exit
STEPS = 250  # of each environment
LEARNING_RATE = 1e-3
BATCH_SIZE = 32
UPDATES = 400
TARGET_EVERY = 20
FLOOR = 0.9  # of the states
TEACHER_GAP = 0.3


class TileNetwork(torch.nn.Module):
    """A linear Q-network of one pixel in each tile: uint8 (B, 4, 84, 84) → float32 (B, num_actions)."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.linear = torch.nn.Linear(4 * 12 * 12, num_actions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, :, 3::7, 3::7].flatten(1) / 255.0).float()


class FlaxTileNetwork(nn.Module):
    """The same in flax."""

    num_actions: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.num_actions)(x[:, :, 3::7, 3::7].reshape(x.shape[0], -1) / 255.0)


TILE_NETWORKS = {qdagger: TileNetwork, dqn_atari: TileNetwork}
TILE_NETWORKS |= {qdagger_jax: FlaxTileNetwork, dqn_atari_jax: FlaxTileNetwork}


class Corridors:
    """Corridors of several colours: each ends with a reward of 1, and has an exit with a smaller one in every room.

    Each state, a room of a corridor, has a frame of its own, and actions with meanings of its own. An episode ends in
    the last room: a bootstrap from there would make exits more valuable than the way.
    """

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        tiles = rng.integers(0, 2, (STATES, 12, 12), np.uint8) * 255
        self.frames = np.kron(tiles, np.ones((7, 7), np.uint8))
        self.meanings = rng.permuted(np.tile(np.arange(NUM_ACTIONS), (STATES, 1)), axis=1)
        self.state = rng.integers(0, STATES, NUM_ENVS)
        self.observation = np.zeros((NUM_ENVS, 4, 84, 84), np.uint8)
        self.observation[:, -1] = self.frames[self.state]
        self.ended = np.zeros(NUM_ENVS, bool)

    def step(self, action: np.ndarray) -> StepResult:
        """Make a step, which resets the episodes that have ended."""
        meaning = self.meanings[self.state, action]
        reset = self.ended
        forward = ~reset & (meaning == FORWARD)
        leaves = ~reset & (meaning == EXIT)
        arrives = forward & (self.state % LENGTH == LENGTH - 1)
        start = self.rng.integers(0, STATES, NUM_ENVS)
        first_room = self.state - self.state % LENGTH
        self.ended = arrives | leaves
        last_room = first_room + LENGTH - 1
        self.state = np.select([reset, self.ended, forward], [start, last_room, self.state + 1], first_room)
        older = np.where(reset[:, None, None, None], 0, self.observation[:, 1:])
        self.observation = np.concatenate([older, self.frames[self.state][:, None]], axis=1)
        reward = arrives + EXIT_REWARD * leaves
        return StepResult(self.observation, reward, self.ended, np.zeros(NUM_ENVS, bool), reset, [])


class Task:
    """A replay buffer of random actions, and a student or agent that learns from it.

    ``teacher_action`` is the action of the teacher in each state, (STATES,), and never the best one.
    """

    def __init__(self, script: ModuleType, seed: int):
        flags = {"gamma": GAMMA, "learning_rate": LEARNING_RATE, "batch_size": BATCH_SIZE, "temperature": 0.1}
        args = twin(qdagger.Args(seed=seed, **flags), script)
        hardware = script.Hardware.choose(args)
        size = STEPS * NUM_ENVS
        self.envs = Corridors(np.random.default_rng(seed))
        self.best_action = self.envs.meanings.argmin(axis=1)
        self.teacher_action = (self.best_action + self.envs.rng.integers(1, NUM_ACTIONS, STATES)) % NUM_ACTIONS
        self.has_teacher = script in (qdagger, qdagger_jax)
        sizes = [size, NUM_ENVS, *[NUM_ACTIONS] * self.has_teacher]
        self.replay = script.Replay(*sizes, args.n_step, hardware)
        self.learner = AGENTS[script](args, NUM_ACTIONS, hardware)
        self.observations = np.zeros((STATES, 4, 84, 84), np.uint8)  # one of each state
        teacher_q_values = TEACHER_GAP * np.eye(NUM_ACTIONS, dtype=np.float32)[self.teacher_action]
        for _ in range(STEPS):
            state = self.envs.state
            observation = self.envs.observation
            self.observations[state] = observation
            action = self.envs.rng.integers(0, NUM_ACTIONS, NUM_ENVS)
            of_teacher = [teacher_q_values[state]] if self.has_teacher else []
            self.replay.add(observation, action, self.envs.step(action), *of_teacher)
        assert (self.observations[:, -1] == self.envs.frames).all(), "a state was not visited"

    def learn(self, distill_coefficient: float) -> np.ndarray:
        """Make updates, and move the target network; return the learnt action of each state, (STATES,)."""
        coefficients = [distill_coefficient, [LEARNING_RATE]] if self.has_teacher else []
        for i in range(UPDATES):
            if i % TARGET_EVERY == 0:
                self.learner.update_target(1.0)
            self.learner.update(self.replay, *coefficients)
        return self.learner.q_values(self.observations).argmax(axis=1)


@pytest.fixture(autouse=True)
def tile_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Q-networks of all scripts by fast ones."""
    for script, network in TILE_NETWORKS.items():
        monkeypatch.setattr(script, "QNetwork", network)


@pytest.mark.parametrize("script", [qdagger, qdagger_jax])
def test_student_comes_to_act_as_its_teacher(script: ModuleType) -> None:
    """At a small temperature, the teacher's small preferences outweigh rewards, by which it is wrong everywhere."""
    task = Task(script, seed=0)
    assert (task.learn(distill_coefficient=1.0) == task.teacher_action).mean() >= FLOOR


@pytest.mark.parametrize("script", TILE_NETWORKS)
def test_rewards_are_maximised(script: ModuleType) -> None:
    """DQN, and a student at λ = 0, find the actions that lead to the end of each corridor."""
    task = Task(script, seed=0)
    assert (task.learn(distill_coefficient=0.0) == task.best_action).mean() >= FLOOR
