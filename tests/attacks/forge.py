"""Forged files: sound ones, changed by mutation or by the grammar of their format into what nobody would write.

Everything is drawn from a `random.Random`, so that a number says again what was forged.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import pickletools
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Bytes = Callable[[bytes, random.Random], bytes]

DEEP = 20_000
NAMES = ["../../etc/passwd", "/dev/zero", "x" * 300, "", "a\0b", "step-9", "\ud800", "\x1b[31m", "nan", "💥" * 50]


def value(chance: random.Random) -> str:
    """Return a JSON text that few readers expect."""
    deep = chance.choice([50, 150, DEEP])
    return chance.choice(
        [
            *("null", "true", "-1", "0", "1e308", "-1e308", "NaN", "Infinity", "1.5", "[]", "{}", '""', '"x"', "[[]]"),
            *(str(2**31), str(2**63), str(-(2**63) - 1), str(10**9), "9" * 4300, "1" * 100_000, "1e999999"),
            *(json.dumps(chance.choice(NAMES)), '"\\ud800"', '"' + "x" * 100_000 + '"', '{"": {"": null}}'),
            *("[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, "[" + "0," * 100_000 + "0]"),
        ]
    )


def bytes_changed(content: bytes, chance: random.Random) -> bytes:
    """Change some bytes: others, none, the same again, an end too early."""
    result = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 5])):
        begin = chance.randrange(len(result) + 1)
        end = min(len(result), begin + chance.choice([1, 1, 4, 50]))
        match chance.randrange(7):
            case 0:
                result[begin:end] = chance.randbytes(end - begin)
            case 1:
                del result[begin:end]
            case 2:
                result[begin:begin] = result[begin:end] * chance.choice([1, 2, 1000])
            case 3:
                del result[begin:]
            case 4:
                result[begin:begin] = chance.choice([b"\0", b"\xff\xfe", b'"', b"\n", b"}", b"[", b"\xed\xa0\x80"])
            case 5:
                result[begin:end] = b"\xff" * (end - begin)
            case 6:
                result[begin:begin] = chance.choice([b"[" * DEEP, b"9" * 5000, b"\n" * 5000])
    return bytes(result)


def json_changed(content: bytes, chance: random.Random) -> bytes:
    """Replace a value or key of a JSON text by one of another type, range or depth."""
    marks: dict[str, str] = {}
    tree = json.loads(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        places = list(_places(tree))
        if not places:
            return value(chance).encode(errors="surrogatepass")
        holder, key = chance.choice(places)
        mark = f"@{len(marks)}@"
        marks[json.dumps(mark)] = value(chance)
        match chance.randrange(5):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[chance.choice(NAMES)] = mark
            case 2:
                holder[key] = [holder[key]] if chance.random() < 0.5 else {"x": holder[key]}
            case _:
                holder[key] = mark
    text = json.dumps(tree)
    for mark, new in marks.items():
        text = text.replace(mark, new)
    return text.encode(errors="surrogatepass")


def _places(tree: Any) -> Any:
    """Yield every place of a tree as (container, key); of long lists some."""
    keys = list(tree)[:20] if isinstance(tree, dict) else range(min(len(tree), 20)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def lines_changed(content: bytes, chance: random.Random) -> bytes:
    """Change one of several lines of JSON."""
    lines = content.splitlines() or [b"{}"]
    at = chance.randrange(len(lines))
    try:
        lines[at] = json_changed(lines[at], chance) if chance.random() < 0.7 else bytes_changed(lines[at], chance)
    except ValueError:
        lines[at] = bytes_changed(lines[at], chance)
    return b"\n".join(lines) + chance.choice([b"", b"\n", b"\n\n"])


def toml_changed(content: bytes, chance: random.Random) -> bytes:
    """Replace or add a value, key or table of a TOML text, of another type, range or depth."""
    lines = content.decode().splitlines()
    settings = [i for i, line in enumerate(lines) if "=" in line and not line.startswith("#")]
    deep = chance.choice([50, 5000])
    odd = [
        *(
            "inf",
            "nan",
            "-1",
            "0",
            "1e308",
            "true",
            "[]",
            "{}",
            '""',
            "[[1], [2]]",
            "1979-05-27",
            "9" * 5000,
            "0x" + "f" * 5000,
        ),
        *(f'"{"x" * 10_000}"', '"../../etc/passwd"', '"/dev/zero"', '"\\u0000"', str(2**31), str(2**63), str(-(2**64))),
        *("[" * deep + "]" * deep, "{a=" * deep + "1" + "}" * deep, "[" + "1," * 100_000 + "]"),
    ]
    at = chance.choice(settings)
    key = lines[at].split("=")[0]
    match chance.randrange(6):
        case 0 | 1 | 2:
            lines[at] = f"{key}= {chance.choice(odd)}"
        case 3:
            lines[at] = ".".join("a" * chance.choice([2, 100, 5000])) + " = 1"
        case 4:
            lines.insert(at, "[" + ".".join("b" * chance.choice([2, 500])) + "]")
        case 5:
            lines.insert(
                at, chance.choice(["[model]", "[[model]]", "x", "= 1", '"" = 1', "a = \x07", "\ufeff", lines[at]])
            )
    return "\n".join(lines).encode()


_BOMB = b"(" + b"K\x01" + b"\x85" + b"2\x86" * 60  # a pair of a pair of ...: 2**60 numbers once anybody looks
_OPCODES = [
    b"r\xff\xff\xff\x7f",  # LONG_BINPUT of a huge place in the memo
    b"p2147483647\n",
    b"j\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f",  # LONG4 of two gigabytes
    b"\x8d" + struct.pack("<Q", 2**62),  # BINUNICODE8
    b"\x8e" + struct.pack("<Q", 2**40),
    b"\x96" + struct.pack("<Q", 2**40),  # BYTEARRAY8 is made before it is read
    b"\x95" + struct.pack("<Q", 2**60),  # FRAME
    b"T\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f",
    b"cposix\nsystem\nX\x0d\x00\x00\x00touch canary!\x85R",
    b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R",
    b"ctorch\nload\n)R",
    b"cbuiltins\ngetattr\n",
    b"(S'touch canary!'\niposix\nsystem\n",
    b"Ptouch\n",
    b"\x88Q",
    b"\x82\x01",
    b"\x93",
    b"R",
    b"b",
    b"\x81",
    b"}b",
    b"0",
    b"1",
    b"2",
    b"a",
    b"e",
    b"u",
    b"s",
    b"(" * 5000,
    b"]" * 5000,
    b"\x85" * 5000,
    b"2\x86" * 60,
    b"}" + b"2K\x002\x86s",
    b"I" + b"9" * 5000 + b"\n",
    b"L" + b"9" * 50_000 + b"L\n",
    b"\x97",
    b"\x98",
    _BOMB,
]


def pickle_changed(content: bytes, chance: random.Random) -> bytes:
    """Insert or replace opcodes of a pickle."""
    places = [place for _, _, place in pickletools.genops(content) if place is not None]
    result = content
    for _ in range(chance.choice([1, 1, 2, 3])):
        at = chance.choice(places)
        end = at if chance.random() < 0.5 else next((p for p in places if p > at), at)
        result = result[:at] + chance.choice(_OPCODES) + result[end:]
    return result


def pickle_bombs(chance: random.Random) -> bytes:
    """Return a whole pickle that is small, and huge once it is built, shown or used as a key."""
    shared: Any = ()
    for _ in range(60):
        shared = (shared, shared)
    build = chance.choice(
        [
            b"\x80\x04" + chance.choice(_OPCODES) + b".",
            b"\x80\x04" + _BOMB + b".",
            b"\x80\x04}" + _BOMB + b"K\x01s.",
            pickle.dumps(shared, 4),
            pickle.dumps({"a": shared}, 2),
            b"(" * 100_000 + b".",
            b"]" + b"]a" * 100_000 + b".",
        ]
    )
    return build


def zipped(change: Bytes) -> Bytes:
    """Change what is in a gzip file, or the file."""

    def changed(content: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.3:
            return bytes_changed(content, chance)
        return gzip.compress(change(gzip.decompress(content), chance), compresslevel=1)

    return changed


def archive_changed(content: bytes, chance: random.Random) -> bytes:
    """Change the last of the archives that `torch.save` wrote one behind another: its entries, their names or kind."""
    begin = max(found.start() for found in re.finditer(rb"PK\x03\x04.{26}[^/]+/data\.pkl", content, re.DOTALL))
    with zipfile.ZipFile(io.BytesIO(content[begin:])) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    compression = zipfile.ZIP_STORED
    at = chance.randrange(len(entries))
    name, inner = entries[at]
    match chance.randrange(7):
        case 0:
            compression = zipfile.ZIP_DEFLATED
            entries[at] = name, bytes(2**26)
        case 1:
            entries[at] = chance.choice(["../../etc/passwd", "a\0b", "archive/data.pkl", "other/data.pkl"]), inner
        case 2:
            entries.append((chance.choice(["other/data.pkl", "archive/data/1", "x" * 60_000]), inner))
        case 3:
            del entries[at]
        case 4:
            entries[at] = name, bytes_changed(inner, chance)
        case _:
            at = next(i for i, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
            numbers = {
                b"K\x02": [b"K\x00", b"K\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\x7f" * 8]
            }
            old, new = next((old, chance.choice(news)) for old, news in numbers.items())
            entries[at] = (
                entries[at][0],
                (entries[at][1].replace(old, new) if chance.random() < 0.5 else pickle_changed(entries[at][1], chance)),
            )
    written = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(written, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, inner in entries:
            archive.writestr(name, inner)
    changed = written.getvalue()
    return content[:begin] + (bytes_changed(changed, chance) if chance.random() < 0.2 else changed)


def safetensors_changed(content: bytes, chance: random.Random) -> bytes:
    """Change the header of a safetensors file, or the length that it gives of it."""
    size = struct.unpack("<Q", content[:8])[0]
    header, rest = content[8 : 8 + size], content[8 + size :]
    match chance.randrange(8):
        case 0:
            return (
                struct.pack("<Q", chance.choice([0, 1, size - 1, size + 1, 10**8, 2**40, 2**63, 2**64 - 1]))
                + content[8:]
            )
        case 1:
            return bytes_changed(content, chance)
        case 2 if chance.random() < 0.1:
            count = 300_000
            header = json.dumps(
                {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
            ).encode()
        case 3:
            rest = rest[: chance.randrange(len(rest) + 1)]
        case _:
            header = json_changed(header, chance)
    return struct.pack("<Q", len(header)) + header + rest


def npy_changed(content: bytes, chance: random.Random) -> bytes:
    """Change the header of an .npy file."""
    size = struct.unpack("<H", content[8:10])[0]
    deep = chance.choice([50, 5000])
    header = chance.choice(
        [
            b"{'descr': '<u2', 'fortran_order': False, 'shape': (" + b"9" * chance.choice([3, 18, 5000]) + b",), }",
            b"{'descr': '<u2', 'fortran_order': False, 'shape': (-1,), }",
            b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
            b"{'descr': '<f8', 'fortran_order': True, 'shape': (3, 3), }",
            b"{'descr': " + b"[" * deep + b"]" * deep + b", 'fortran_order': False, 'shape': (3,), }",
            b"__import__('os').system('touch canary!')",
            bytes_changed(content[10 : 10 + size], chance)[:60_000],
        ]
    )
    if chance.random() < 0.3:
        return bytes_changed(content, chance)
    version = chance.choice([1, 1, 2, 3, 9])
    length = struct.pack("<H", len(header) % 2**16) if version == 1 else struct.pack("<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + content[10 + size :]


def of_zeros(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def put_no_file(path: Path, chance: random.Random) -> str:
    """Replace a file by a FIFO, device, folder, link or a huge file; return which."""
    path.unlink()
    what = chance.choice(["FIFO", "device", "folder", "link to nothing", "link to itself", "sparse", "empty", "spaces"])
    match what:
        case "FIFO":
            os.mkfifo(path)
        case "device":
            path.symlink_to(chance.choice(["/dev/zero", "/dev/full", "/dev/null", "/dev/urandom"]))
        case "folder":
            path.mkdir()
        case "link to nothing":
            path.symlink_to("nothing")
        case "link to itself":
            path.symlink_to(path.name)
        case "sparse":
            of_zeros(path, chance.choice([2**32, 2**43]))
        case "empty":
            path.write_bytes(b"")
        case "spaces":
            path.write_bytes(b" " * 50_000_000)
    return what
