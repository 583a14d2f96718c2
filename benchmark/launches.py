"""How many operations PyTorch dispatches for an update of QDagger, at least one launch each on a GPU.

    python benchmark/launches.py

Counted on the CPU, with bfloat16 and the flags' defaults. An update of small networks takes a GPU about as long as its
launches; when several are due at once, they share sampling and the pass of the target network. Views, which compute
nothing, are left out. A convolution and its gradient are one operation each, though of two to four kernels.
"""

import collections
import copy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cleanrl import qdagger_dqn_atari_impalacnn as script
from cleanrl_utils.torch_speed import WorkingCopy


class Count(TorchDispatchMode):
    """Counts the operations that are dispatched while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):
            self.operations[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    device, args, num_actions = torch.device("cpu"), script.Args(), 6
    network = script.QNetwork(num_actions).to(memory_format=torch.channels_last)
    student, target = WorkingCopy(network, bf16=True), WorkingCopy(copy.deepcopy(network), bf16=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, fused=True)
    replay = script.Replay(100 * args.num_envs, num_actions, args, device)
    for ring in (replay.frame, replay.action, replay.reward, replay.terminated, replay.age, replay.teacher_q_values):
        ring.zero_()
    replay.valid.fill_(True)
    update = script.make_update(student, target, optimizer, replay, args)
    low, high = torch.tensor(4), torch.tensor(90)  # tensors, as in a CUDA graph
    update(low, high, 1.0, [1e-4])
    print(f"torch {torch.__version__}, batch {args.batch_size}\n")
    print("| updates at once | operations of one | most of them |\n|---|---|---|")
    for due in (1, args.num_envs // args.train_frequency, script.offline_updates_per_call(args)):
        with Count() as count:
            update(low, high, 1.0, due * [1e-4])
        most = ", ".join(f"{name} {number / due:.1f}" for name, number in count.operations.most_common(6))
        print(f"| {due} | {count.operations.total() / due:.1f} | {most} |")


if __name__ == "__main__":
    main()
