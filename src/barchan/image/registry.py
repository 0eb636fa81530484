"""A client of one registry: the distribution protocol of the Open Container Initiative, over HTTP.

Every answer is taken as a stranger's: bounded, checked, and repeated nowhere but in an error's few words. Tokens and
passwords go to the registry's own origin and to the token server that it names, and into no message.
"""

import asyncio
import io
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from time import monotonic
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from barchan.errors import (
    BackendError,
    BarchanError,
    BlobCorrupt,
    CapacityError,
    ConnectionLost,
    ConnectTimeout,
    Denied,
    InvalidSpec,
    NotFound,
    ReadTimeout,
    RemoteProtocolError,
    TransportError,
)
from barchan.image.oci import ACCEPTED, DOCUMENT_BYTES_MAX, Descriptor, sha256
from barchan.image.registry_auth import Challenge, Credentials, parse_challenge
from barchan.image.registry_rules import (
    CONNECT_S_MAX,
    DEFAULT_RETRIES,
    FAILURES,
    REQUEST_S_MAX,
    SILENCE_S_MAX,
    Again,
    Retries,
    is_address,
    is_loopback,
    read_bounded,
    retry_after_s,
)

REDIRECTS_MAX = 5
REDIRECTED = (301, 302, 303, 307, 308)
TOKEN_BYTES_MAX = 64 << 10
READ_BYTES = 256 << 10
UPLOAD_BYTES = 8 << 20  # of one request; a cut costs at most this
UPLOAD_BYTES_MAX = 256 << 20  # that a registry may ask for as its least
PROGRESS_BYTES = 1 << 20  # after this many, a cut counts as a first one again
PROGRESS_S_MAX = 600.0  # for so many; slower is a cut
Result = TypeVar("Result")


class Registry:
    """One registry by its `HOST[:PORT]`.

    Args:
        session: From `new_session`; the caller's, who closes it.
        plain_http: Speak HTTP without TLS; loopback addresses always do.
    """

    def __init__(
        self,
        host: str,
        session: aiohttp.ClientSession,
        *,
        plain_http: bool = False,
        credentials: Credentials | None = None,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        try:
            self._origin = URL(f"{'http' if plain_http or is_loopback(host) else 'https'}://{host}")
            usable = is_address(self._origin)
        except ValueError:
            usable = False
        if not usable:
            raise InvalidSpec(f"{host!r} is no HOST[:PORT] of a registry")
        self.host = host
        self._session = session
        self._credentials = credentials
        self._retries = retries
        self._authorization: dict[str, str] = {}
        self._logging_in = asyncio.Lock()

    async def manifest(self, repository: str, reference: str) -> tuple[bytes, str]:
        """A manifest or index by tag or digest, with its media type. A digest is verified."""
        what = f"{self.host}/{repository}:{reference}".replace(":sha256:", "@sha256:")
        url = self._url(repository, "manifests", reference)

        async def attempt() -> tuple[bytes, str]:
            headers = {"Accept": ", ".join(ACCEPTED)}
            async with await self._send("GET", url, _pull(repository), headers) as response:
                self._check(response, (200,), what)
                return await read_bounded(response, DOCUMENT_BYTES_MAX, what), response.content_type

        data, media_type = await self._retried(attempt, what)
        if reference.startswith("sha256:") and sha256(data) != reference:
            raise BlobCorrupt(f"{what} was answered with other bytes, of {sha256(data)}")
        return data, media_type

    async def document(self, repository: str, blob: Descriptor) -> bytes:
        """A small blob, whole, verified by its digest."""
        what = f"{self.host}/{repository}@{blob.digest}"
        if blob.size > DOCUMENT_BYTES_MAX:
            raise InvalidSpec(f"{what} has {blob.size} bytes; at most {DOCUMENT_BYTES_MAX} are read")
        async with aclosing(self.blob(repository, blob)) as chunks:
            data = b"".join([chunk async for chunk in chunks])
        if sha256(data) != blob.digest:
            raise BlobCorrupt(f"{what} was answered with other bytes, of {sha256(data)}")
        return data

    async def blob(self, repository: str, blob: Descriptor) -> AsyncGenerator[bytes, None]:
        """The bytes of a blob; after a cut it goes on where it was. The digest is the caller's to check.

        Raises:
            BlobCorrupt: It has another size.
            ConnectionLost: It was cut too often.
        """
        what = f"{self.host}/{repository}@{blob.digest}"
        url = self._url(repository, "blobs", blob.digest)
        position = failed_at = 0
        failures = 0
        while True:
            headers = {"Range": f"bytes={position}-"} if position else {}

            async def attempt(headers: Mapping[str, str] = headers) -> aiohttp.ClientResponse:
                response = await self._send("GET", url, _pull(repository), headers, total_s=None)
                self._check(response, (200, 206) if headers else (200,), what)
                return response

            response = await self._retried(attempt, what)
            skip = _missing_bytes(response, position, what)
            came, mark_s = 0, monotonic()  # what is had already counts, too
            try:
                async with response:
                    async for chunk in response.content.iter_chunked(READ_BYTES):
                        came += len(chunk)
                        wanted, skip = chunk[skip:], max(0, skip - len(chunk))
                        position += len(wanted)
                        if position > blob.size:
                            raise BlobCorrupt(f"{what} has more than the {blob.size} bytes that its manifest says")
                        if wanted:
                            yield wanted
                        if came >= PROGRESS_BYTES:
                            came, mark_s = 0, monotonic()
                        elif monotonic() - mark_s > PROGRESS_S_MAX:
                            raise TimeoutError
            except FAILURES as error:
                if position == blob.size:
                    return  # only the end of the answer is missing
                failures = 1 if position - failed_at >= PROGRESS_BYTES else failures + 1
                failed_at = position
                if failures >= self._retries.attempts:
                    raise self._lost(error, what) from error
                await asyncio.sleep(self._retries.wait_s(failures))
            else:
                if position < blob.size:
                    raise BlobCorrupt(f"{what} has {position} bytes; its manifest says {blob.size}")
                return

    async def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the registry holds a blob, or a manifest's bytes, in this repository."""
        what = f"{self.host}/{repository}@{digest}"

        async def attempt() -> bool:
            url = self._url(repository, "blobs", digest)
            async with await self._send("HEAD", url, _push(repository)) as response:
                self._check(response, (200, 404), what)
                return response.status == 200

        return await self._retried(attempt, what)

    async def upload(self, repository: str, path: Path, blob: Descriptor) -> None:
        """Bring a file as a blob. A cut costs one part of it.

        Raises:
            Denied: The registry lets us not write there.
            TransportError: It failed too often.
        """
        what = f"{self.host}/{repository}@{blob.digest}"
        for attempt in range(1, self._retries.attempts + 1):
            if attempt > 1 and await self.has_blob(repository, blob.digest):
                return  # brought by an attempt whose answer was lost
            try:
                return await self._upload(repository, path, blob, what)
            except (TransportError, NotFound):  # an upload that the registry forgot is begun again
                if attempt == self._retries.attempts:
                    raise
                await asyncio.sleep(self._retries.wait_s(attempt))

    async def put_manifest(self, repository: str, reference: str, data: bytes, media_type: str) -> None:
        """Name what was uploaded: a manifest under a tag or its digest."""
        what = f"{self.host}/{repository}:{reference}"

        async def attempt() -> None:
            url = self._url(repository, "manifests", reference)
            headers = {"Content-Type": media_type}
            async with await self._send("PUT", url, _push(repository), headers, data) as response:
                self._check(response, (201,), what)

        await self._retried(attempt, what)

    async def _upload(self, repository: str, path: Path, blob: Descriptor, what: str) -> None:
        location, part_bytes = await self._start_upload(repository, what)
        position = failures = most = 0
        while position < blob.size:
            data = await asyncio.to_thread(_part, path, position, part_bytes)
            try:
                location, position = await self._patch(repository, location, position, data, what)
                if position > most:  # and not again and again what the registry forgets
                    most, failures = position, 0
            except Again as again:
                failures += 1
                if failures == self._retries.attempts:
                    raise again.failure from again
                await asyncio.sleep(
                    min(again.after_s or self._retries.wait_s(failures), self._retries.retry_after_max_s)
                )
                location, position = await self._resume(repository, location, what)

        async def finish() -> None:
            url = location.update_query(digest=blob.digest)
            async with await self._send("PUT", url, _push(repository), {"Content-Length": "0"}) as response:
                self._check(response, (201, 204), what)

        await self._retried(finish, what)

    async def _start_upload(self, repository: str, what: str) -> tuple[URL, int]:
        async def attempt() -> tuple[URL, int]:
            url = URL(f"{self._url(repository, 'blobs', 'uploads')}/", encoded=True)
            async with await self._send("POST", url, _push(repository), {"Content-Length": "0"}) as response:
                self._check(response, (202,), what)
                least = response.headers.get("OCI-Chunk-Min-Length", "")
                asked = int(least) if re.fullmatch(r"[0-9]{1,12}", least) else 0
                if asked > UPLOAD_BYTES_MAX:
                    raise RemoteProtocolError(f"{self.host} wants parts of {asked} bytes, which is more than is held")
                return self._location(response, what), max(UPLOAD_BYTES, asked)

        return await self._retried(attempt, what)

    async def _patch(self, repository: str, location: URL, start: int, data: bytes, what: str) -> tuple[URL, int]:
        end = start + len(data)
        headers = {"Content-Type": "application/octet-stream", "Content-Range": f"{start}-{end - 1}"}
        try:
            async with await self._send("PATCH", location, _push(repository), headers, data) as response:
                self._check(response, (202,), what)
                return self._location(response, what), end
        except FAILURES as error:
            raise Again(self._lost(error, what)) from error

    async def _resume(self, repository: str, location: URL, what: str) -> tuple[URL, int]:
        """Ask how much of an upload has come; the location may have changed, too."""

        async def attempt() -> tuple[URL, int]:
            async with await self._send("GET", location, _push(repository)) as response:
                self._check(response, (204,), what)
                found = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", response.headers.get("Range", "0-0"))
                last = int(found[1]) if found else 0
                return self._location(response, what, location), last + 1 if last else 0

        return await self._retried(attempt, what)

    def _location(self, response: aiohttp.ClientResponse, what: str, default: URL | None = None) -> URL:
        value = response.headers.get("Location")
        if value is None:
            if default is not None:
                return default
            raise RemoteProtocolError(f"{what}: the registry said not where to upload to")
        return self._target(response.url, value, what)

    @staticmethod
    def _target(base: URL, value: str, what: str) -> URL:
        try:
            target = base.join(URL(value, encoded=True))
            usable = is_address(target)
        except ValueError:
            usable = False
        if not usable:
            raise RemoteProtocolError(f"{what}: the registry sent us to something that is no address")
        if base.scheme == "https" and target.scheme != "https":
            raise RemoteProtocolError(f"{what}: the registry sent us to {target.host} without TLS, which is refused")
        return target

    def _url(self, repository: str, *rest: str) -> URL:
        return self._origin.with_path("/".join(("/v2", repository, *rest)), encoded=True)

    async def _retried(self, attempt: Callable[[], Awaitable[Result]], what: str) -> Result:
        """Repeat what failed in a way that may pass, with growing waits; the last failure is raised."""
        for number in range(1, self._retries.attempts + 1):
            wait_s = self._retries.wait_s(number)
            failure: BarchanError
            try:
                return await attempt()
            except Again as again:
                failure, cause = again.failure, again.__cause__
                if again.after_s is not None:
                    if again.after_s > self._retries.retry_after_max_s:
                        raise failure from cause
                    wait_s = again.after_s
            except FAILURES as error:
                failure, cause = self._lost(error, what), error
            if number == self._retries.attempts:
                raise failure from cause
            await asyncio.sleep(wait_s)
        raise AssertionError("attempts is at least 1")

    async def _send(
        self,
        method: str,
        url: URL,
        scope: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        total_s: float | None = REQUEST_S_MAX,
    ) -> aiohttp.ClientResponse:
        """One request with what authorization we have, after a log-in if the registry asks for one. Not retried."""
        used = self._authorization.get(scope)
        response = await self._follow(method, url, used, headers or {}, body, total_s)
        if response.status != 401 or response.url.origin() != self._origin.origin():
            return response
        challenge = parse_challenge(", ".join(response.headers.getall("WWW-Authenticate", [])))
        response.close()
        async with self._logging_in:
            if self._authorization.get(scope) == used:
                self._authorization[scope] = await self._log_in(challenge, scope)
        return await self._follow(method, url, self._authorization[scope], headers or {}, body, total_s)

    async def _follow(
        self,
        method: str,
        url: URL,
        authorization: str | None,
        headers: Mapping[str, str],
        body: bytes | None,
        total_s: float | None,
    ) -> aiohttp.ClientResponse:
        """Send, and follow redirects of reads; only the registry's own origin is told who we are."""
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX)
        for _ in range(REDIRECTS_MAX + 1):
            sent = dict(headers)
            if authorization is not None and url.origin() == self._origin.origin():
                sent["Authorization"] = authorization
            data = io.BytesIO(body) if body is not None else None  # sent in pieces
            response = await self._session.request(
                method, url, headers=sent, data=data, allow_redirects=False, timeout=timeout
            )
            if method not in ("GET", "HEAD") or response.status not in REDIRECTED:
                return response
            response.close()
            url = self._target(url, response.headers.get("Location", ""), self.host)
        raise RemoteProtocolError(f"{self.host} redirects without an end")

    async def _log_in(self, challenge: Challenge | None, scope: str) -> str:
        """The value of an Authorization header that answers a challenge."""
        known = self._credentials
        if challenge is None:
            raise Denied(f"{self.host} refuses us and does not say what it wants", status=401)
        if challenge.scheme == "basic":
            if known is None or known.basic is None:
                raise Denied(f"{self.host} wants a user and password, {self._no_credentials}", status=401)
            return known.basic
        realm = self._realm(challenge)
        asked = {"service": challenge.parameters.get("service", ""), "scope": challenge.parameters.get("scope", scope)}
        what = f"the token server of {self.host}"

        async def attempt() -> bytes:
            if known is not None and known.identity_token:
                form = {**asked, "grant_type": "refresh_token", "client_id": "barchan"}
                form["refresh_token"] = known.identity_token
                request = self._session.post(realm, data=form, allow_redirects=False)
            else:
                headers = {"Authorization": known.basic} if known is not None and known.basic is not None else {}
                request = self._session.get(realm.extend_query(asked), headers=headers, allow_redirects=False)
            async with request as response:
                self._check(response, (200,), what)
                return await read_bounded(response, TOKEN_BYTES_MAX, what)

        answer = await self._retried(attempt, what)
        try:
            found = msgspec.json.decode(answer, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = {}
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]{1,32768}", token):
            raise RemoteProtocolError(f"{what} answered without a token")
        return f"Bearer {token}"

    def _realm(self, challenge: Challenge) -> URL:
        """Where tokens are had; it gets our credentials, so it must be at least as well protected as the registry."""
        try:
            realm = URL(challenge.parameters.get("realm", ""))
            usable = is_address(realm)
        except ValueError:
            usable = False
        if not usable:
            raise RemoteProtocolError(f"{self.host} names no token server")
        if self._origin.scheme == "https" and realm.scheme != "https":
            raise RemoteProtocolError(f"{self.host} names a token server without TLS, {realm.host}, which is refused")
        return realm.with_user(None)

    def _check(self, response: aiohttp.ClientResponse, expected: tuple[int, ...], what: str) -> None:
        """Raise what an unexpected status means, and let go of the connection."""
        status = response.status
        if status in expected:
            return
        response.close()
        if status == 429:
            after_s = retry_after_s(response.headers.get("Retry-After", ""))
            message = f"{what}: the registry {self.host} limits how much it answers (status 429); ask again later"
            wait_ms = int(1000 * (after_s if after_s is not None else self._retries.longest_s))
            raise Again(CapacityError(f"{message} (try: a mirror)", retry_after_ms=wait_ms), after_s)
        if status >= 500 or status == 408:
            after_s = retry_after_s(response.headers.get("Retry-After", ""))
            raise Again(TransportError(f"{what}: {self.host} failed with status {status} (try: again later)"), after_s)
        if status == 416:  # a part of an upload or of a blob that does not follow what the registry has
            raise Again(BackendError(f"{what}: {self.host} has lost its place (try: again)", status=status))
        if status == 401:
            raise Denied(f"{what}: {self.host} refuses us, {self._no_credentials}", status=status)
        if status == 403:
            raise Denied(f"{what}: {self.host} does not let us do that (try: other credentials)", status=status)
        if status == 404:
            raise NotFound(f"{what}: {self.host} has no such thing (try: another name or tag)", reference=what)
        raise BackendError(f"{what}: {self.host} answered with status {status}", status=status)

    @property
    def _no_credentials(self) -> str:
        if self._credentials is None:
            return "and there are no credentials for it (try: --auth-file with a config file of Docker's)"
        return "with the credentials that there are (try: others)"

    def _lost(self, error: BaseException, what: str) -> TransportError:
        kind = type(error).__name__
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return ConnectTimeout(f"{what}: {self.host} can't be reached in time ({kind}) (try: again later)")
        if isinstance(error, TimeoutError):
            return ReadTimeout(f"{what}: {self.host} stopped answering ({kind}) (try: again later)")
        return ConnectionLost(f"{what}: the connection to {self.host} failed ({kind}: {error}) (try: again later)")


def _pull(repository: str) -> str:
    return f"repository:{repository}:pull"


def _push(repository: str) -> str:
    return f"repository:{repository}:pull,push"


def _part(path: Path, position: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(position)
        return file.read(size)


def _missing_bytes(response: aiohttp.ClientResponse, position: int, what: str) -> int:
    """How many of an answer's first bytes we have already: a server need not know of ranges."""
    if response.status == 200:
        return position
    found = re.match(r"bytes ([0-9]{1,18})-", response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != position:
        response.close()
        raise RemoteProtocolError(f"{what}: asked for bytes from {position} on, the registry sent others")
    return 0
