"""Errors of systems and of libraries: which may end by waiting, and which never do."""

import asyncio
import errno
import http.client
import itertools
import socket
import ssl
import urllib.error
from collections.abc import Callable
from typing import Any

import aiohttp
import botocore.exceptions as of_botocore
import datasets.exceptions as of_datasets
import httpx
import pytest
import requests
import torch
import urllib3.exceptions as of_urllib3
from fsspec.exceptions import FSTimeoutError
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from multidict import CIMultiDict, CIMultiDictProxy
from s3fs.errors import translate_boto_error
from yarl import URL

from torchtitan_graph.checkpoint import SaveError
from torchtitan_graph.errors import UserError
from torchtitan_graph.train import exit_code
from torchtitan_graph.transient import causes, is_lost_peer, is_transient, is_unknown_host


def of_s3(status: int, code: str) -> of_botocore.ClientError:
    answer: Any = {"Error": {"Code": code, "Message": "Please."}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return of_botocore.ClientError(answer, "PutObject")


def of_hub(status: int) -> Exception:
    library = {kind.__module__.partition(".")[0] for kind in HfHubHTTPError.__mro__} & {"httpx", "httpx2"}
    web = __import__(library.pop())
    return HfHubHTTPError("hub", response=web.Response(status, request=web.Request("GET", "https://hub")))


def of_requests(status: int) -> Exception:
    answer = requests.Response()
    answer.status_code = status
    return requests.HTTPError("status", response=answer)


def of_httpx(status: int) -> Exception:
    request = httpx.Request("GET", "https://a")
    return httpx.HTTPStatusError("status", request=request, response=httpx.Response(status, request=request))


def of_aiohttp(status: int) -> Exception:
    address, headers = URL("https://a"), CIMultiDictProxy(CIMultiDict[str]())
    return aiohttp.ClientResponseError(aiohttp.RequestInfo(address, "GET", headers, address), (), status=status)


def of_urllib(status: int) -> Exception:
    return urllib.error.HTTPError("https://a", status, "status", None, None)  # type: ignore[arg-type]


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
WAIT = [
    OSError(errno.EIO, "Input/output error"),
    REFUSED,
    TimeoutError("read"),
    asyncio.TimeoutError(),
    FSTimeoutError(),
    http.client.RemoteDisconnected("without an answer"),
    http.client.IncompleteRead(b"half"),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError("Response payload is not completed"),
    caused(
        aiohttp.ClientPayloadError("Response payload is not completed"),
        aiohttp.http_exceptions.ContentLengthError("received 1000 of 2000 bytes"),
    ),
    aiohttp.ClientOSError(errno.EPIPE, "Broken pipe"),
    requests.ConnectionError("reset"),
    requests.ReadTimeout(),
    of_urllib3.ProtocolError("Connection broken"),
    httpx.ReadTimeout("read"),
    httpx.ConnectError("connect"),
    of_botocore.EndpointConnectionError(endpoint_url="http://store"),
    of_botocore.ReadTimeoutError(endpoint_url="http://store"),
    of_botocore.ConnectTimeoutError(endpoint_url="http://store"),
    of_botocore.ConnectionClosedError(endpoint_url="http://store"),
    of_botocore.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    of_s3(503, "SlowDown"),
    of_s3(400, "RequestTimeout"),
    translate_boto_error(of_s3(503, "ServiceUnavailable")),
    translate_boto_error(of_s3(404, "NoSuchUpload")),
    translate_boto_error(of_s3(404, "NoSuchBucket")),
    translate_boto_error(of_s3(500, "InternalError")),
    translate_boto_error(of_s3(429, "TooManyRequests")),
    caused(LocalEntryNotFoundError("not in the cache"), httpx.ConnectError("connect")),
    caused(ConnectionError("Couldn't reach 'a/b' on the Hub"), of_hub(503)),
    caused(UserError("can't be used"), translate_boto_error(of_s3(503, "SlowDown"))),
]


class Untold(RuntimeError):
    def __str__(self) -> str:
        raise AttributeError("of a library's own")


TELL = [
    Untold(),
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
    RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"),
    of_s3(403, "AccessDenied"),
    translate_boto_error(of_s3(404, "NoSuchKey")),
    translate_boto_error(of_s3(400, "AnUnknownCode")),  # s3fs makes it an EIO
    translate_boto_error(of_s3(501, "NotImplemented")),
    of_botocore.NoCredentialsError(),
    OfflineModeIsEnabled("offline"),
    caused(ConnectionError("Couldn't reach 'a/b' on the Hub"), OfflineModeIsEnabled("offline")),
    caused(of_datasets.DatasetNotFoundError("a/b doesn't exist"), of_hub(404)),
    caused(requests.exceptions.SSLError("a host"), ssl.SSLCertVerificationError("certificate verify failed")),
    requests.exceptions.SSLError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"),
    httpx.UnsupportedProtocol("ftp"),
    UserError("model.name = 'x'"),
    caused(UserError(f"no number: {REFUSED}"), ValueError("x")),  # it quotes words, which decide nothing
]


@pytest.mark.parametrize("error", WAIT, ids=repr)
def test_an_error_that_waiting_may_end(error: Exception) -> None:
    assert is_transient(error)


def unknown(code: int) -> Exception:
    """Return the error of botocore, which names no cause, for a name server's answer."""
    error = of_botocore.EndpointConnectionError(endpoint_url="http://store")
    error.__context__ = aiohttp.ClientConnectorDNSError(None, socket.gaierror(code, "a name"))  # type: ignore[arg-type]
    error.__context__.__cause__ = socket.gaierror(code, "a name")
    return error


def test_a_host_that_does_not_exist_is_told_from_a_name_server_that_is_away() -> None:
    assert is_unknown_host(unknown(socket.EAI_NONAME)) and not is_unknown_host(unknown(socket.EAI_AGAIN))
    assert is_transient(unknown(socket.EAI_NONAME)), "a host that was reached may be unknown for a while"
    assert not is_unknown_host(REFUSED)


def test_a_mistake_is_one_also_where_it_quotes_the_error_before_it() -> None:
    try:
        try:
            raise REFUSED
        except OSError as error:
            raise UserError(f"--x: {error}") from None
    except UserError as error:
        assert not is_transient(error) and exit_code(error) == 2


@pytest.mark.parametrize("error", TELL, ids=lambda error: type(error).__name__)
def test_an_error_that_no_waiting_ends(error: Exception) -> None:
    assert not is_transient(error)


@pytest.mark.parametrize("library", [of_hub, of_requests, of_httpx, of_aiohttp, of_urllib])
def test_an_http_status_decides(library: Callable[[int], Exception]) -> None:
    waited_for = [status for status in (400, 401, 403, 404, 408, 409, 416, 429, 500, 501, 502, 503, 504, 507)
        if is_transient(library(status))]  # fmt: skip
    assert waited_for == [408, 429, 500, 502, 503, 504]
    assert not is_transient(caused(library(404), REFUSED))


def test_an_error_that_caused_itself_is_looked_at_once() -> None:
    error = ValueError("no")
    error.__cause__ = caused(UserError("why"), error)
    assert [*itertools.islice(causes(error), 3)] == [error, error.__cause__]


GLOO = RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


def test_a_lost_peer_is_one_under_any_error() -> None:
    assert is_lost_peer(GLOO) and is_lost_peer(torch.distributed.DistBackendError("NCCL error: remote process exited"))
    assert is_lost_peer(caused(UserError("LlamaForCausalLM can't run"), GLOO))
    assert not is_lost_peer(SaveError("could not be copied (ReadTimeoutError: read timed out)"))
    assert not is_lost_peer(RuntimeError("shapes can't be multiplied")) and not is_lost_peer(REFUSED)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("model.name = 'x'"), 2),
        (caused(UserError("LlamaForCausalLM can't run"), GLOO), 1),
        (caused(SaveError("could not be copied"), GLOO), 1),
        (SaveError("could not be copied (OSError: quota exceeded)"), 4),
        (caused(SaveError("could not be copied"), of_s3(503, "SlowDown")), 6),
        (caused(UserError("checkpoint.remote_folder can't be used"), REFUSED), 6),
        (RuntimeError("shapes can't be multiplied"), 1),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_run_ends_with_the_code_of_what_caused_its_error(error: Exception, code: int) -> None:
    assert exit_code(error) == code
