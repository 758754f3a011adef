"""These tests need the null GPU: scripts/check_cuda_without_gpu.py builds it, and runs each in a process of its own."""

import os

collect_ignore_glob = [] if "NULL_GPU" in os.environ else ["test_*.py"]
