"""What every backend offers a node."""

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from barchan.backends.container.lazy import ReaderSettings
from barchan.backends.guest import GuestConnection
from barchan.core.choosing import Isolation
from barchan.errors import InvalidSpec
from barchan.image.store import ImageStore
from barchan.image.template import Template
from barchan.model.image import TemplateKind
from barchan.model.node import Requirement
from barchan.model.sandbox import Network, Root, SandboxSpec, SandboxStats
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.pager.link import PagerLink

Unavailability = Callable[[Sequence[str], str], None]
WHY_CHARS_MAX = 400


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a backend can do; ask before calling. What is not here every backend can.

    Attributes:
        isolation: What stands between a guest and the host.
        own_kernel: Guest system calls do not reach the host's kernel.
        fork: A sandbox can start from another one's files (`cut`, `pack`).
        memory_snapshot: Processes can be stored and started from there (`dump`, `restore`), so that there are forks
            with memory and hibernation.
        memory_by_host: `memory_snapshot` depends on the host, and is known when the backend has started.
        shares_memory: Any number can go on from one memory directory at the same time, which none of them changes.
        zygote: Sandboxes can have a warm interpreter (`warm`).
        warm: It makes sandboxes ahead of their creates (`slots`).
        any_image: These can become a sandbox of any image, and do not belong to a template.
        page_out: A stopped guest's memory can be given away.
        calls: It runs functions (`Client.call`).
        screen: A guest has a screen, a keyboard and a mouse.
        kinds: Of images that it can make a sandbox of.
        memory_mib_min: Of a guest; no less can be asked for.
        networks: Of those that a spec can ask for.
        roots: Likewise.
        bounds_root: A guest's root can't reach its init, and has no power of a root's but what `root` says.
        start_s_max: What a create takes at most, with what only the first of its kind takes; then it fails by itself.
        storing_mib: Of the host's memory, what `dump` may take beside the guest's own limit.
    """

    isolation: Isolation = "container"
    own_kernel: bool = False
    fork: bool = False
    memory_snapshot: bool = False
    memory_by_host: bool = False
    shares_memory: bool = False
    zygote: bool = False
    warm: bool = False
    any_image: bool = False
    page_out: bool = False
    calls: bool = False
    screen: bool = False
    kinds: frozenset[TemplateKind] = frozenset({"root"})
    memory_mib_min: int = 16
    networks: frozenset[Network] = frozenset({"none"})
    roots: frozenset[Root] = frozenset({"plain"})
    bounds_root: bool = True
    start_s_max: float = 120.0
    storing_mib: int = 0

    def check(self, spec: SandboxSpec) -> None:
        """Raise `InvalidSpec` for a sandbox that such a backend can't make."""
        if spec.network not in self.networks:
            raise InvalidSpec(f"the {spec.backend} backend has no network={spec.network!r}")
        if spec.root not in self.roots:
            raise InvalidSpec(f"the {spec.backend} backend has no root={spec.root!r}")
        if spec.memory_mib < self.memory_mib_min:
            raise InvalidSpec(
                f"memory_mib={spec.memory_mib} is too little for the {spec.backend} backend: "
                f"at least {self.memory_mib_min}"
            )
        if spec.zygote is not None and not self.zygote:
            raise InvalidSpec(f"the {spec.backend} backend has no warm interpreters: create without zygote")


class Ended(Struct, frozen=True, kw_only=True):
    """Why a guest ended on its own, from its init's wait status and the kernel's counters.

    `why`: in words, where there is more to say; some of it may be the guest's own.
    """

    wstatus: int
    oom_kills: int
    why: str = ""

    @property
    def words(self) -> str:
        """What a sandbox's end says of it, in one line."""
        oom = f", {self.oom_kills} out-of-memory kills" if self.oom_kills else ""
        why = "".join(char if char.isprintable() else " " for char in self.why[:WHY_CHARS_MAX])
        return f"wait status {self.wstatus}{oom}" + (f": {why}" if why else "")


class Activity(Struct, frozen=True, kw_only=True):
    """What a guest's programs do at one moment.

    Attributes:
        has_programs: There are some.
        waits_for_client: Every one of them waits for its input, or for another of them to end: they do nothing until
            somebody outside does.
        cpu_s: That they have used, all together, since the sandbox was made.
        waits_for_events: Every one of them waits without a limit of time, for input, for a connection or for another of
            them: nothing goes on before somebody outside does something, but for timers that only their process knows.
    """

    has_programs: bool
    waits_for_client: bool
    cpu_s: float
    waits_for_events: bool = False


class Handle(Protocol):
    """One live sandbox of a backend. Whoever has it calls `destroy` in the end; until then the sandbox lives.

    `guest` is the connection to its init: programs, their streams, signals and files are asked of that, and are the
    same for every backend. Where that connection is lost and the guest is not, the handle takes up another one.
    `ended` is done when the init is gone without having been asked to, however that came: every call afterwards may
    raise `SandboxLost`, but `destroy`. `listener` (network `allow`) is a listening TCP socket inside the sandbox;
    `netns` (network `open`) a descriptor of its network namespace; both belong to the handle.

    Limits (`memory_mib`, `pids_max`, `disk_mib`, `cpus`) hold for the guest, not for its init: with all of them
    exhausted, `guest` answers, file operations and programs of the platform's leaf run, and a kill kills.

    Calls may overlap, and whatever the guest does they come to an end: they answer, or raise. What is not said of a
    cancellation: it leaves the sandbox as it was, or as the call would have left it.
    """

    sandbox_id: str
    guest: GuestConnection
    ended: asyncio.Future[Ended]

    @property
    def listener(self) -> socket.socket | None: ...

    @property
    def proxy_host(self) -> str:
        """The address at which the guest's programs find what listens at `listener`."""

    @property
    def netns(self) -> int | None: ...

    async def destroy(self) -> None:
        """Kill everything in the sandbox and remove all it left on the host: processes, mounts, cgroups, namespaces,
        files. Safe to repeat and to run at any time, also amid every other call, which then ends. Readers of `guest`
        are told by the caller, before.

        Raises:
            BackendError: What holds the sandbox can't be reached; it removes it when it ends.

        Cancellation: The removal goes on.
        """

    async def platform_leaf(self) -> None:
        """Make room beside the guest's limits for platform execs; repeating is cheap.

        Raises:
            BackendError, SandboxLost: There is none, and nothing has changed.
        """

    async def pack(self, target: Path) -> None:
        """Write the sandbox's writable layer, as it is at one moment, into a new file: an EROFS image.

        Raises:
            CapacityError: There is no room for it, or the guest could not be stopped for that moment.
            GuestWrecked: What the guest made can't be a layer.

        Cancellation: Nothing is left but the file, which may be half written.
        """

    async def pack_cut(self, name: str, target: Path) -> None:
        """As `pack`, of the sandbox's cut `name`; the guest goes on meanwhile."""

    async def cut(self, name: str, copies: int = 0) -> None:
        """Keep the writable layer, as it is at one moment, as the cut `name`, until `remove_cut` or the next node.

        The guest is stopped for that moment; one that is stopped already stays so.

        Args:
            copies: Sandboxes that are about to start from it, which then need not wait for one another.

        Raises:
            CapacityError: There is no room for it, or the guest could not be stopped.

        Cancellation: No cut is left.
        """

    async def dump(self, target: Path, *, keep: bool, cut: str | None = None) -> MemoryRecord:
        """Store its processes and their memory in the new directory `target`, on a local file system.

        Args:
            cut: Keep its files of the same moment, as `cut` does; on a failure that cut may be left.
            keep: The sandbox goes on as it was, and stays frozen if it was; else its processes are gone afterwards,
                and the caller destroys the rest.

        Raises:
            NotSnapshotable: It holds something that can't be stored; it is as it was.
            RequirementMissing: The host can store no memory.
            SandboxLost: It broke on the way, and has ended.
            CapacityError, BackendError: It could not be stopped or written; it is as it was.

        Cancellation: Seen when it has come to its end. On any failure `target` is gone.
        """

    async def freeze(self) -> None:
        """Stop every program of the guest, and the init's timers; the init still answers. Repeating is harmless.

        Raises:
            CapacityError: They did not stop, and go on.
        """

    async def thaw(self, frozen_s: float) -> None:
        """Let the guest's programs go on, and the init's timers with what was left; `frozen_s`: since when not.

        Its wall clock is right when this returns. One that was not frozen needs nothing. Backends whose guests are not
        stopped by the host's own means may have something to say to the init first, and then wait for it.

        Raises:
            SandboxLost: It did not come back.
        """

    async def page_out(self) -> int:
        """Give away what can be given of a frozen guest's memory; returns by how many bytes it has shrunk.

        No byte of it is lost, and the guest needs no call to have it back.
        """

    def activity(self) -> Activity:
        """What its programs do now, as the host or the guest's kernel sees it, never the programs themselves.

        Costs some 20 us for each of them. Where it can't be told, they count as working.
        """

    async def warm(self) -> str:
        """Have the warm interpreter of the sandbox's zygote ready in it; returns the name of its socket.

        Raises:
            InvalidSpec: The sandbox was not made of a zygote, or the interpreter can't be had any more.
            BackendError: It could not be brought into the sandbox.
        """

    async def end_if_starved(self, within_s: float) -> bool:
        """End the sandbox, as one whose image is unavailable, if its programs have spent the last `within_s` seconds
        waiting for bytes of its image rather than running. False: it lives on.
        """

    def oom_kills(self) -> int:
        """The kernel's count of out-of-memory kills under the guest's memory limit, never falling.

        It is the evidence by which a death by SIGKILL is told as out of memory: it rises before that death is told. A
        guest's root must not be able to raise it otherwise.
        """

    def host_kills(self) -> int:
        """The kernel's count of programs of the guest that it killed because the host itself was out of memory."""

    def stats(self) -> SandboxStats:
        """Kernel counters as they are now: of the guest's programs, whatever hosts them. CPU time never falls."""


class SlotCounts(Struct, frozen=True, kw_only=True):
    """Slots now, and what became of all so far; see `model.pool.PoolInfo`."""

    ready: int
    filling: int
    claimed: int
    cold: int
    filled: int
    died: int
    fill_ms: float


class Slots(Protocol):
    """Sandboxes made ahead of their creates, each under the id that its sandbox will have. None is used twice."""

    async def keep(self, count: int, prefix: str) -> SlotCounts:
        """Fill up to `count`, paced, and drop what is beyond; ids begin with `prefix`."""

    def take(self, spec: SandboxSpec, template: Template) -> str | None:
        """The id of one that is ready and can become this; nobody else is given it. None: there is none.

        A backend whose slots belong to a template learns here which are wanted, and fills them by itself, within
        bounds of its own; `keep` then only drops them, at 0.
        """

    def is_lent(self, sandbox_id: str) -> bool:
        """Taken, and neither started nor given back."""

    def put_back(self, sandbox_id: str) -> None:
        """One that is lent is not wanted after all, and its id was told to nobody."""

    async def let_go(self, sandbox_id: str) -> None:
        """One that is lent is not wanted, and its id can be no other sandbox's."""


class MemoryPager(Protocol):
    """Gives restored sandboxes their memory while they run. One whose memory can't be had is ended as unavailable."""

    async def start(self) -> None:
        """Have it ready, so that the first restore need not wait for it. Raises `RequirementMissing`."""

    async def serve(self, sandbox_id: str, snapshot_id: str) -> PagerLink:
        """What `Backend.restore` is given with a directory that lacks what may come later, of the node's snapshot.

        Raises:
            SnapshotCorrupt, NotFound: The snapshot can't be used. CapacityError: Too much is being restored.
            RequirementMissing: It can't be started.
        """

    def link(self, sandbox_id: str) -> PagerLink | None:
        """Of a sandbox whose memory is not complete."""


class Host(Protocol):
    """What a node gives its backends. `weaken`: protections to switch off, for the tests that show they matter."""

    @property
    def state_dir(self) -> Path: ...

    @property
    def images(self) -> ImageStore: ...

    @property
    def weaken(self) -> tuple[str, ...]: ...

    @property
    def reader(self) -> ReaderSettings: ...

    async def backend(self, name: str) -> "Backend":
        """Another backend of the same node, started.

        Raises:
            InvalidSpec: There is none of this name. RequirementMissing: It can't run here.
        """


class Backend(Protocol):
    """How isolation is done. `start` before use; `close` leaves the sandboxes running for the next node.

    What holds sandboxes up outlives the node: a node that is killed, at any moment, finds them again with `found` and
    `adopt`, with their processes, and their output at its offsets. Where nobody comes back in time, or what holds them
    dies itself, all of them end and nothing stays on the host.

    What a backend lacks it says in `capabilities`; the node refuses that with `InvalidSpec` before a call is made here.
    All else is checked by the suite of docs/conformance.md.

    `on_unavailable(sandbox_ids, cause)` is called when bytes of an image could not be had in time. Those sandboxes run
    no more; when it has returned, whoever waits for the bytes is told.
    """

    capabilities: Capabilities
    on_unavailable: Unavailability

    @property
    def slots(self) -> Slots: ...

    @property
    def pager(self) -> MemoryPager: ...

    def probe(self) -> Sequence[Requirement]:
        """What the backend needs of this host, and whether it holds: found by trying, with nothing left behind."""

    async def start(self) -> None:
        """Get ready, or find what an earlier node left.

        Raises:
            RequirementMissing: The host lacks something; nothing was started.

        Cancellation: As a failure; it may be started again.
        """

    async def create(self, sandbox_id: str, spec: SandboxSpec, template: Template, *, cut: str | None = None) -> Handle:
        """Start a sandbox; its init answers when this returns, and its limits hold.

        Nothing of another sandbox is in it but what `cut` says: no random bytes, addresses, names or times either, for
        backends that make sandboxes as copies of a running one.

        Args:
            sandbox_id: No sandbox has had it, but a slot that was taken for this create.
            cut: What the writable layer starts as: a cut of a sandbox of the same layers. None: empty.

        Raises:
            BootFailed: It did not come up; nothing of it is left.
            InvalidSpec: It can't be made so, by a reason that `capabilities` can't tell.
            RequirementMissing: The host lacks what this one needs. BlobUnavailable: Bytes of its image can't be had.
            CapacityError: No room on the host now.

        Cancellation: What was half made is removed before the cancellation is seen.
        """

    async def remove_cut(self, name: str) -> None:
        """Let go of a cut; one that is not there needs nothing. Sandboxes that started from it keep their files."""

    async def restore(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        template: Template,
        memory: Path,
        record: MemoryRecord,
        *,
        cut: str | None,
        pager: PagerLink | None = None,
    ) -> Handle:
        """A new sandbox whose processes come from the memory directory `memory`; it may be used any number of times.

        Its guest is frozen when this returns; its init answers, and its kernel has fresh entropy.

        Args:
            record: The directory's own.
            cut: What its writable layer starts as; None: empty.
            pager: Brings the memory while the sandbox runs; the directory then holds only what that leaves out.

        Raises:
            BootFailed: It did not come up; nothing of it is left.
            SnapshotCorrupt: The directory is not as `dump` makes it.
            RequirementMissing: The host can restore no memory.

        Cancellation: What was half made is removed before the cancellation is seen.
        """

    async def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> Handle:
        """Take over a sandbox that an earlier node started, in whatever state that left it, also half way through a
        pause, a dump or a fork. It is frozen, if it was; the caller thaws it.

        Raises:
            SandboxLost, BackendError, TimeoutError: It can't be served any more; the caller discards it.
        """

    def adopted(self) -> None:
        """Every sandbox of an earlier node was adopted or discarded: what concerns them may be told from now on."""

    async def found(self) -> list[str]:
        """Ids of the sandboxes of this backend that are alive, whoever started them; half made ones among them."""

    async def discard(self, sandbox_id: str) -> None:
        """Remove a sandbox that nobody knows, as `Handle.destroy` does.

        Raises:
            NotFound: There is none of this id any more.
        """

    async def unmount(self, digests: Iterable[str] | None = None) -> None:
        """Let go of those layers (None: of all) that the image store has no more; one in use later, when it is not."""

    def memory_use(self) -> tuple[int, int]:
        """Bytes that all sandboxes take now, and how many of them are a cache that the kernel can drop."""

    async def lost(self) -> None:
        """Return when what holds the sandboxes is gone, and they with it."""

    async def close(self) -> None:
        """Let go of everything; sandboxes stay alive for the next node, within the supervisor's grace."""

    async def shutdown(self) -> None:
        """End every sandbox and whatever the backend runs on this host."""
