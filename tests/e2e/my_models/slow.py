"""The tiny family, with steps that take as long as SLOW_S says: the same numbers, on a cluster that is to stop it."""

import os
import time
from typing import Any

from my_models.tiny import FLAVORS, HF_KEYS, PLAN

from torchtitan_graph.models import llama3

__all__ = ["FLAVORS", "HF_KEYS", "PLAN", "Model"]


class Model(llama3.Model):
    def masks(self, *args: Any) -> Any:
        time.sleep(float(os.environ.get("SLOW_S", "0")))
        return super().masks(*args)
