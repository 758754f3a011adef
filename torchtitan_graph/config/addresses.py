"""Addresses that fsspec opens, such as s3://bucket/run: what is one, and which can't be opened here."""

import re

from fsspec import available_protocols, get_filesystem_class

_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp",
    "https": "aiohttp", "abfs": "adlfs", "az": "adlfs",
}  # fmt: skip


def is_address(path: str) -> bool:
    """Return whether a path is an address, and not one of the local file system."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.:-]*://", path) is not None


def is_web(path: str) -> bool:
    """Return whether a path is the address of a file of a web server."""
    return path.startswith(("http://", "https://"))


def path_of(path: str) -> str:
    """Return a path without the query and the fragment that it has as an address of a web server."""
    return re.split("[?#]", path, maxsplit=1)[0] if is_web(path) else path


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern of files' names; of a web address no character is one."""
    return not is_web(path) and bool(set(path) & set("*?["))


def find_bad_address(address: str) -> str | None:
    """Return why fsspec can't open an address, None if nothing is wrong; it isn't opened."""
    protocols, _, path = address.partition("://")
    if not path.strip("/"):
        return "must be an address such as s3://bucket/run; a plain folder is file:///path/of/the/folder"
    for protocol in protocols.split("::"):
        try:
            get_filesystem_class(protocol)
        except ImportError as error:
            package = _PACKAGES.get(protocol, "it")
            return f"the package that opens {protocol}:// is not installed; pip install {package} ({error})"
        except ValueError:
            return f"unknown protocol {protocol!r}; known are {', '.join(sorted(available_protocols()))}"
    return None
