"""The family with experts, whose rank 1 is killed amid a step: at its second microbatch once KILL_AFTER is there."""

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from my_models.experts import FLAVORS, HF_KEYS, PLAN

from torchtitan_graph.models import deepseek_v3

__all__ = ["FLAVORS", "HF_KEYS", "PLAN", "Model"]


class Model(deepseek_v3.Model):
    num_microbatches = 0

    def masks(self, *args: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1 and Path(os.environ.get("KILL_AFTER", "never")).exists():
            self.num_microbatches += 1
            if self.num_microbatches == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().masks(*args)
