"""Which errors are nobody's mistake: transient ones, of a server or a network that may answer again, and lost ranks.

Local disks, network disks, object stores and the Hugging Face hub share this one policy. Classes are recognized by
name, so that no library has to be imported, or installed.
"""

import errno
import re
import socket
from collections.abc import Iterator
from typing import Any

_ERRNOS = "EIO ESTALE ETIMEDOUT ENOTCONN ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH EREMOTEIO"
TRANSIENT = {getattr(errno, name) for name in _ERRNOS.split() if hasattr(errno, name)}

# HTTP: request timeout, too early, too many requests; and those of the server's own errors that no waiting ends.
_STATUSES, _LASTING = {408, 425, 429}, {501, 505, 506, 507, 508, 510, 511}
# Codes in an answer of S3 that say more than its HTTP status. NoSuchUpload, to the second try of a request to end an
# upload in parts, whose first answer was lost: the upload can be begun again. NoSuchBucket, of a bucket that was there
# before: a store that is repaired or restarted may answer so.
_NO_BUCKET = "NoSuchBucket"
_S3_CODES = {
    *("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "InternalError"),
    *("ServiceUnavailable", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "OperationAborted"),
    *("NoSuchUpload", _NO_BUCKET),
}

_NO_HOST = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}

_HTTPX = "NetworkError ProxyError RemoteProtocolError TimeoutException"
# Classes of errors by their packages; those derived from them count, too.
_CLASSES = {
    "builtins": "ConnectionAbortedError ConnectionRefusedError ConnectionResetError TimeoutError",
    "asyncio": "IncompleteReadError TimeoutError",  # in Python 3.10 not the built-in TimeoutError
    "concurrent": "TimeoutError",
    "http": "IncompleteRead",
    "socket": "gaierror",  # also of a name that does not exist: a host that was reached may be unknown for a while
    "ssl": "SSLEOFError SSLZeroReturnError",
    "aiohttp": "ClientConnectionError ClientPayloadError",
    "azure": "IncompleteReadError ServiceRequestError ServiceResponseError",
    "botocore": "ConnectionError FlexibleChecksumError HTTPClientError IncompleteReadError ResponseParserError",
    "google": "TransportError",
    **dict.fromkeys(("httpcore", "httpcore2", "httpx", "httpx2"), _HTTPX),
    "requests": "ChunkedEncodingError ConnectionError Timeout",
    "urllib3": "MaxRetryError NewConnectionError ProtocolError TimeoutError",
}
_NAMES = {f"{package}.{name}" for package, names in _CLASSES.items() for name in names.split()}
# What torch.distributed says of a rank that is gone; its errors are RuntimeErrors.
_LOST_PEER = re.compile(
    "closed by peer|connection reset|connection closed|timed out|timeout|broken pipe|nccl", re.IGNORECASE
)
# Causes of such errors that no waiting ends.
_FINAL = {"huggingface_hub.OfflineModeIsEnabled", "ssl.SSLCertVerificationError"}


def is_transient(error: BaseException) -> bool:
    """Return whether an error is transient: by itself, by an error that caused it, or by an error that it quotes.

    An HTTP status decides where there is one: libraries translate it into different errnos. Otherwise errnos and
    classes do. `error.transient`, where it is set, is the answer: for an error that lost its cause on the way from
    another process.
    """
    errors = list(causes(error))
    for each in errors:
        if (known := getattr(each, "transient", None)) is not None:
            return bool(known)
    if any(_names(each) & _FINAL or "CERTIFICATE_VERIFY_FAILED" in _text(each) for each in errors):
        return False
    for each in errors:
        status, s3_code = _answer(each)
        if status is not None:
            return s3_code in _S3_CODES or status in _STATUSES or (status >= 500 and status not in _LASTING)
    return any(map(_is_transient_alone, errors))


def is_missing_bucket(error: BaseException) -> bool:
    """Return whether an object store has answered that it has no such bucket."""
    return any(_answer(each)[1] == _NO_BUCKET for each in causes(error))


def is_unknown_host(error: BaseException) -> bool:
    """Return whether a name server has answered that there is no host of such a name; not that it is away itself."""
    each: BaseException | None = error
    for _ in range(10):  # botocore's errors have no cause, and a circle of contexts would not end
        if isinstance(each, socket.gaierror):
            return each.errno in _NO_HOST
        each = each and (each.__cause__ or each.__context__)
    return False


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, reports only that another rank ended, or timed out."""
    return any(_is_of_torch(each) and _LOST_PEER.search(_text(each)) for each in causes(error))


def _is_of_torch(error: BaseException) -> bool:
    """Return whether an error may be one of torch.distributed: of its own classes, or gloo's plain RuntimeError."""
    return type(error) is RuntimeError or (
        isinstance(error, RuntimeError) and type(error).__module__ == "torch.distributed"
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, the error that caused that one, and so on."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__


def in_words(error: BaseException) -> str:
    """Return an error's class and text, and those of the first of its causes: fsspec makes "no such file" of a server
    that is away."""
    first = [*causes(error)][-1]
    cause = f" ({type(first).__name__}: {_text(first)})" if first is not error else ""
    return f"{type(error).__name__}: {_text(error)}{cause}"


def is_refused(error: BaseException) -> bool:
    """Return whether a server has answered another thing than that there is no such file."""
    return any(_answer(each)[0] not in (None, 404, 410) for each in causes(error))


def _text(error: BaseException) -> str:
    """Return an error's text; of an error of any library's, whose own code may fail, "" then."""
    try:
        return str(error)
    except Exception:
        return ""


def _names(error: BaseException) -> set[str]:
    """Return the names of an error's classes, each with its package."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}


def _answer(error: BaseException) -> tuple[int | None, str | None]:
    """Return the HTTP status that an error carries, and the code of S3, None for what it lacks."""
    answer: Any = getattr(error, "response", None)
    if isinstance(answer, dict):  # of botocore's ClientError
        s3_code = (answer.get("Error") or {}).get("Code")
        return _status((answer.get("ResponseMetadata") or {}).get("HTTPStatusCode") or s3_code), s3_code
    if "aiohttp.HttpProcessingError" in _names(error):  # its code is no server's: half an answer has 400
        return None, None
    places = [(answer, "status_code"), (answer, "status"), (error, "status_code"), (error, "status"), (error, "code")]
    found = (_status(getattr(place, name, None)) for place, name in places)
    return next((status for status in found if status is not None), None), None


def _status(value: Any) -> int | None:
    """Return a value as the HTTP status of an error, None if it is none."""
    number = int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else 0
    return number if 400 <= number < 600 else None


def _is_transient_alone(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in TRANSIENT:
        return True
    if type(error) is ConnectionError or _names(error) & _NAMES:  # not BrokenPipeError: a pipe's reader has ended
        return True
    if "torchtitan_graph.UserError" in _names(error) and (error.__cause__ or error.__context__):
        return False  # what it quotes has been looked at, or does not matter
    # Of another rank, or of a library that keeps the text alone.
    return any(int(number) in TRANSIENT for number in re.findall(r"\[Errno (\d+)\]", _text(error)))
