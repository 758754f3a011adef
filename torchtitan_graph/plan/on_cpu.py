"""A CPU's prices: its operators by replay, its memory and its optimizer's step measured, gloo's messages by a table."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.cost import Costs, Link
from torchtitan_graph.graph.liveness import Memories, size_of
from torchtitan_graph.graph.traffic import kind_of, received
from torchtitan_graph.optim import clip_grad_norm
from torchtitan_graph.plan.build import Rank
from torchtitan_graph.plan.replay import COLDNESS, Replay
from torchtitan_graph.plan.simulate import Prices
from torchtitan_graph.rates import Rates
