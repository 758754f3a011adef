"""Run tests/gpuless: the CUDA path on a machine without a GPU, on a stand-in that launches nothing.

    python -m venv gpuless && gpuless/bin/pip install torch -e '.[dev]'
    gpuless/bin/python scripts/check_cuda_without_gpu.py [-k WORDS]

It needs a CUDA build of torch, the newest that pip gives, in an environment of its own, a C++ compiler, and no GPU.
Each test has a process of its own. docs/reference/cuda_without_a_gpu.md describes what is checked.
The exit code is 0 if all pass, 1 if one fails, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpuless"
SOURCE = TESTS / "null_gpu.cpp"
NOT_RUN = 2  # exit code
NO_TESTS = 5  # pytest's exit code
SITE = Path(sysconfig.get_path("platlib"))
# Symbols of the CUDA runtime, cuBLAS, NCCL and the driver.
SYMBOL = r"(?:__cuda|cuda|cublas|nccl|cu[A-Z])\w*"


def build(folder: Path) -> Path:
    """Compile the null GPU against the headers in torch's wheels; return the library, named like the driver's."""
    headers = [*SITE.glob("nvidia/cu*/include"), SITE / "nvidia/nccl/include", SITE / "triton/backends/nvidia/include"]
    wanted: set[str] = set(re.findall(r"\b(cu[A-Z]\w*)\(", (SITE / "triton/backends/nvidia/driver.c").read_text()))
    for name in ("c10_cuda", "torch_cuda", "torch_python", "caffe2_nvrtc"):
        library = SITE / f"torch/lib/lib{name}.so"
        symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
        wanted.update(re.findall(rf" U ({SYMBOL})", symbols))
    answered = re.findall(rf"\b({SYMBOL})\b", SOURCE.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    generated = "".join(f"UNANSWERED({name})\n" for name in sorted(wanted.difference(answered)))
    (folder / "unanswered.inc").write_text(generated)
    library = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}", *(f"-I{path}" for path in headers)]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1", SOURCE, "-o", library, "-ldl"], check=True)
    return library


def why_not() -> str | None:
    """Return a message of what is missing here, None if nothing is."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; in an environment of its own: pip install torch -e '.[dev]'"
    if not (SITE / "triton/backends/nvidia/driver.c").is_file() or not [*SITE.glob("nvidia/cu*/include")]:
        return f"{SITE} has no headers of CUDA and Triton, which come with pip's torch; install that"
    if missing := [tool for tool in ("g++", "nm") if shutil.which(tool) is None]:
        return f"{', '.join(missing)}: not found; install a C++ compiler and binutils"
    return None


def environment(library: Path) -> dict[str, str]:
    """Return the environment of a process that uses the null GPU."""
    return os.environ | {
        "NULL_GPU": "1",
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiling processes would be forked before there is a GPU
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # memory is 0 when it is allocated, not old data
        "OMP_NUM_THREADS": "1",
    }


def pytest(arguments: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run pytest in a process of its own; return its exit code and output."""
    ours = ["-o", "filterwarnings=ignore", "-o", "timeout=1800", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *ours, *arguments]
    done = subprocess.run(command, cwd=TESTS.parents[1], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="WORDS", help="only tests whose names match, as of pytest")
    args = parser.parse_args()
    if reason := why_not():
        parser.exit(NOT_RUN, f"check_cuda_without_gpu: not run: {reason}\n")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        env = environment(build(Path(folder)))
        code, text = pytest(["--collect-only", "-q", "-k", args.k, str(TESTS)], env)
        tests = [line for line in text.splitlines() if "::" in line and not line.startswith("ERROR")]
        if code == NO_TESTS:
            parser.exit(NOT_RUN, f"check_cuda_without_gpu: -k {args.k!r}: no test of {TESTS} has such a name\n")
        if code:
            said = "\n".join(line for line in text.splitlines() if line not in tests)
            parser.exit(NOT_RUN, f"{said}\ncheck_cuda_without_gpu: the tests can't be collected\n")
        for number, test in enumerate(tests, 1):
            begin = time.perf_counter()
            code, text = pytest(["-q", "-s", test], env)
            notes = ["  " + line.partition("note: ")[2] for line in text.splitlines() if "note: " in line]
            result = "FAILED" if code else "ok"
            print(f"{number}/{len(tests)} {test.partition('::')[2]}: {result}  ({time.perf_counter() - begin:.0f} s)")
            print("\n".join([text] if code else notes), end="\n" * bool(code or notes), flush=True)
            failed += [test] * bool(code)
    if failed:
        raise SystemExit(f"check_cuda_without_gpu: {len(failed)} of {len(tests)} failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
