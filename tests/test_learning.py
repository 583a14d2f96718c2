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
from helpers import twin

from cleanrl_utils.atari import StepResult

NUM_ACTIONS = 4
NUM_ENVS = 8
COLOURS = 4
LENGTH = 4  # rooms of a corridor
STATES = COLOURS * LENGTH
FORWARD = 0
EXIT = 1  # the other actions go back to the first room
EXIT_REWARD = 0.3
GAMMA = 0.8  # the first room is worth 0.8³: more than the exit, and less than an exit after which life goes on
STEPS = 250  # of each environment
LEARNING_RATE = 1e-3
BATCH_SIZE = 64
UPDATES = 400
TARGET_EVERY = 20
FLOOR = 0.9


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


class Corridors:
    """Corridors of several colours: each ends with a reward of 1, and has an exit with a smaller one in every room.

    Each state, a room of a corridor, has a frame of its own, and actions with meanings of its own.
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
        self.state = np.select([reset, self.ended, forward], [start, self.state, self.state + 1], first_room)
        older = np.where(reset[:, None, None, None], 0, self.observation[:, 1:])
        self.observation = np.concatenate([older, self.frames[self.state][:, None]], axis=1)
        reward = arrives + EXIT_REWARD * leaves
        return StepResult(self.observation, reward, self.ended, np.zeros(NUM_ENVS, bool), reset, [])


def learn(script: ModuleType, seed: int, distill_coefficient: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Learn from random actions; return the learnt, the teacher's and the best action of each state, (STATES,)."""
    args = twin(qdagger.Args(seed=seed, gamma=GAMMA, learning_rate=LEARNING_RATE, batch_size=BATCH_SIZE, temperature=0.1), script)
    rng = np.random.default_rng(seed)
    envs = Corridors(rng)
    best_action = envs.meanings.argmin(axis=1)
    teacher_action = (best_action + rng.integers(1, NUM_ACTIONS, STATES)) % NUM_ACTIONS  # never the best
    teacher_q_values = 0.3 * np.eye(NUM_ACTIONS, dtype=np.float32)[teacher_action]
    hardware = script.choose_hardware(args)
    with_teacher = script in (qdagger, qdagger_jax)
    if with_teacher:
        replay = script.Replay(STEPS * NUM_ENVS, NUM_ENVS, NUM_ACTIONS, args.n_step, hardware)
        learner = script.Student(args, NUM_ACTIONS, hardware)
    else:
        replay = script.Replay(STEPS * NUM_ENVS, NUM_ENVS, args.n_step, hardware)
        learner = script.Agent(args, NUM_ACTIONS, hardware)
    observations = np.zeros((STATES, 4, 84, 84), np.uint8)
    for _ in range(STEPS):
        state = envs.state
        observation = envs.observation
        observations[state] = observation
        action = rng.integers(0, NUM_ACTIONS, NUM_ENVS)
        result = envs.step(action)
        replay.add(observation, action, result, *([teacher_q_values[state]] if with_teacher else []))
    assert (observations[:, -1] == envs.frames).all(), "a state was not visited"
    for _ in range(UPDATES // TARGET_EVERY):
        if with_teacher:
            learner.update(replay, distill_coefficient, [args.learning_rate] * TARGET_EVERY)
        else:
            for _ in range(TARGET_EVERY):
                learner.update(replay)
        learner.update_target(1.0)
    return learner.q_values(observations).argmax(axis=1), teacher_action, best_action
