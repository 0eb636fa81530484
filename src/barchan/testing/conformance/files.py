"""Files: read and written as a user of the guest, with that user's rights, and without trust in what is there."""

import asyncio
import io
import os
import random
import tarfile
from pathlib import Path

from barchan.errors import BarchanError, Denied, NotFound, QuotaExceeded, RemoteProtocolError
from barchan.testing.check import check
from barchan.testing.expect import equal, holds, raises
from barchan.testing.lab import MIB, Lab, text

ROOT_SECRET = "/root/secret"


@check()
async def what_is_written_is_read(lab: Lab) -> None:
    """Megabytes of any bytes, whole and in parts, by the platform and by programs."""
    sandbox = await lab.create()
    data = random.Random(7).randbytes(4 * MIB + 13)
    await sandbox.files.write("/tmp/deep/er/data", data, mode=0o640)
    equal(await sandbox.files.read("/tmp/deep/er/data") == data, True, "whether it came back")
    equal(await sandbox.files.read("/tmp/deep/er/data", MIB, 100), data[MIB : MIB + 100])
    equal(await sandbox.files.read("/tmp/deep/er/data", len(data), 100), b"")
    equal(await text(sandbox, "stat -c '%s %a' /tmp/deep/er/data"), f"{len(data)} 640\n")
    equal(await text(sandbox, "cmp /tmp/deep/er/data - && echo same", stdin=data), "same\n")
    await text(sandbox, "printf 'from inside' > /tmp/inside")
    equal(await sandbox.files.read_text("/tmp/inside"), "from inside")


@check()
async def a_write_replaces_a_file_in_one_step(lab: Lab) -> None:
    """Who has the old file open goes on reading that; nothing half written is ever seen."""
    sandbox = await lab.create()
    await sandbox.files.write("/tmp/file", "old")
    process = await sandbox.start("exec 5< /tmp/file; echo open; read x; cat <&5")
    async for _ in process.output():
        break
    await sandbox.files.write("/tmp/file", "new, and longer")
    await process.write_stdin("go\n")
    said = b"".join([data async for stream, _, data in process.output() if stream == "stdout"])
    equal(said, b"open\nold")
    equal(await sandbox.files.read("/tmp/file"), b"new, and longer")
    equal([entry.path for entry in await sandbox.files.list("/tmp") if "file" in entry.path], ["/tmp/file"])


@check()
async def entries_are_told_as_they_are(lab: Lab) -> None:
    """Kind, size, mode, owner and time; a link is not followed."""
    sandbox = await lab.create()
    await text(sandbox, "cd /tmp; mkdir dir; echo x > dir/f; ln -s dir/f link; mkfifo fifo; chmod 705 dir", user="root")
    found = {os.path.basename(entry.path): entry for entry in await sandbox.files.list("/tmp")}
    kinds = {name: found[name].kind for name in ("dir", "link", "fifo")}
    equal(kinds, {"dir": "directory", "link": "symlink", "fifo": "fifo"})
    equal((found["dir"].mode, found["dir"].uid, found["link"].target), (0o705, 0, "dir/f"))
    info = await sandbox.files.stat("/tmp/dir/f")
    equal((info.kind, info.size), ("file", 2))
    now = float(await text(sandbox, "date +%s"))
    holds(abs(info.mtime_unix_s - now) < 60, "its time is now")
    equal((await sandbox.files.exists("/tmp/dir"), await sandbox.files.exists("/tmp/none")), (True, False))


@check()
async def entries_are_made_moved_and_removed(lab: Lab) -> None:
    """What is missing, or in the way, is refused, and then nothing has changed."""
    sandbox = await lab.create()
    files = sandbox.files
    await files.mkdir("/tmp/a/b")
    await files.write("/tmp/a/b/c", "x")
    await files.move("/tmp/a/b/c", "/tmp/a/d")
    equal((await files.exists("/tmp/a/b/c"), await files.read("/tmp/a/d")), (False, b"x"))
    await raises(BarchanError, files.remove("/tmp/a"))
    equal(await files.read("/tmp/a/d"), b"x")
    await files.remove("/tmp/a", recursive=True)
    holds(not await files.exists("/tmp/a"), "it is gone")
    for call in (files.read("/tmp/a"), files.stat("/tmp/a"), files.list("/tmp/a"), files.move("/tmp/a", "/tmp/b")):
        await raises(NotFound, call)


@check()
async def names_of_every_kind_can_be_used(lab: Lab) -> None:
    """Spaces, new lines, quotes, letters of any script, and a path of 3,000 bytes."""
    sandbox = await lab.create()
    for name in ("a b", "new\nline", 'it\'s "so"', "grün", "-rf", "%41"):
        await sandbox.files.write(f"/tmp/names/{name}", name)
        equal(await sandbox.files.read_text(f"/tmp/names/{name}"), name)
    found = {os.path.basename(entry.path) for entry in await sandbox.files.list("/tmp/names")}
    equal(found, {"a b", "new\nline", 'it\'s "so"', "grün", "-rf", "%41"})
    deep = "/tmp/" + "/".join(["d" * 200] * 15)
    await sandbox.files.write(deep, "deep")
    equal(await sandbox.files.read(deep), b"deep")


@check()
async def rights_are_those_of_the_user_who_asks(lab: Lab) -> None:
    """What a user can't read, write, list or remove, an operation for that user can't, by name or through a link."""
    sandbox = await lab.create(user="1000:1000")
    files, root = sandbox.files, sandbox.files.as_user("root")
    await root.write(ROOT_SECRET, "secret", mode=0o600)
    # Not in a sticky directory, where a kernel may let nobody follow another user's links, whatever he may read.
    await text(sandbox, "mkdir -m 777 /srv/open", user="root")
    await text(sandbox, f"ln -s {ROOT_SECRET} /srv/open/link; ln -s /etc /srv/open/etc")
    for call in (
        files.read(ROOT_SECRET),
        files.read("/srv/open/link"),
        files.write("/srv/open/etc/passwd", "x"),
        files.mkdir("/srv/open/etc/made"),
        files.remove("/srv/open/etc/passwd"),
        files.move("/srv/open/etc/passwd", "/tmp/taken"),
    ):
        await raises(Denied, call)
    equal(await root.read("/srv/open/link"), b"secret")
    await files.write("/tmp/mine", "x")
    owners = [(await files.stat(path)).uid for path in ("/tmp/mine", "/etc/passwd")]
    equal(owners, [1000, 0])


@check()
async def reads_never_wait_for_the_guest(lab: Lab) -> None:
    """A FIFO, a device, a socket and a loop of links are refused at once."""
    sandbox = await lab.create()
    trap = (
        "import os, socket; os.mkfifo('/tmp/fifo'); os.symlink('loop', '/tmp/loop'); socket.socket(1).bind('/tmp/sock')"
    )
    await text(sandbox, ["python3", "-c", trap])
    for path in ("/tmp/fifo", "/tmp/sock", "/tmp/loop", "/dev/zero"):
        error = await raises(BarchanError, sandbox.files.read(path, timeout_s=lab.s(10)))
        equal(error.fault, "caller", f"whose fault reading {path} is")


@check()
async def trees_go_in_and_come_back(lab: Lab) -> None:
    """Directories, links within, modes of programs; as they went."""
    sandbox = await lab.create()
    source, back = lab.folder / "source", lab.folder / "back"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/grün").write_bytes(random.Random(1).randbytes(300_000))
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    (source / "deep/up").symlink_to("../run")
    await sandbox.files.upload(source, "/tmp/tree")
    equal(await text(sandbox, ["/tmp/tree/deep/up"]), "ran\n")
    await sandbox.files.download("/tmp/tree", back)
    equal(_tree(back), _tree(source))
    await sandbox.files.download("/tmp/tree/run", lab.folder / "alone")
    equal((lab.folder / "alone").read_text(), "#!/bin/sh\necho ran\n")


def _tree(root: Path) -> dict[str, tuple[object, ...]]:
    """What lies below a directory: kind and content, and whether it can be run."""
    return {
        str(path.relative_to(root)): ("link", os.readlink(path))
        if path.is_symlink()
        else ("directory",)
        if path.is_dir()
        else ("file", path.read_bytes(), os.access(path, os.X_OK))
        for path in root.rglob("*")
    }


@check()
async def a_download_writes_nothing_outside_its_target(lab: Lab) -> None:
    """Links that lead out are refused, set-id bits stay behind, and a file without end is cut off."""
    sandbox = await lab.create()
    await text(sandbox, "mkdir /tmp/evil /tmp/set /tmp/huge; ln -s /etc /tmp/evil/link", user="root")
    await raises(RemoteProtocolError, sandbox.files.download("/tmp/evil", lab.folder / "evil"))
    equal(list((lab.folder / "evil").iterdir()), [])
    await text(sandbox, "cp /bin/true /tmp/set/x; chmod 6777 /tmp/set/x; truncate -s 1T /tmp/huge/x", user="root")
    await sandbox.files.as_user("root").download("/tmp/set", lab.folder / "set")
    status = (lab.folder / "set/x").stat()
    equal((status.st_mode & 0o7777, status.st_uid), (0o755, os.getuid()))
    await raises(QuotaExceeded, sandbox.files.download("/tmp/huge", lab.folder / "huge", max_bytes=MIB))


@check()
async def an_archive_can_not_leave_its_directory(lab: Lab) -> None:
    """Entries that climb, or that go through a link which leads out, are refused by the sandbox."""
    sandbox = await lab.create(user="root")
    for name, link in (("../climbed", ""), ("/etc/absolute", ""), ("link/through", "/etc")):
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            if link:
                leads = tarfile.TarInfo("link")
                leads.type, leads.linkname = tarfile.SYMTYPE, link
                tar.addfile(leads)
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"evil"))
        try:
            await sandbox.files.write_tar("/tmp/target", archive.getvalue())
        except BarchanError as error:
            holds(error.fault in ("caller", "policy"), f"{name} is no fault of the platform's: {error}")
    for path in ("/tmp/climbed", "/etc/absolute", "/etc/through"):
        holds(not await sandbox.files.exists(path), f"{path} was not written")


@check()
async def changes_are_told_while_they_happen(lab: Lab) -> None:
    """Created, changed and removed below a directory, from the return of the call on."""
    sandbox = await lab.create()
    await sandbox.files.mkdir("/tmp/watched")
    async with await sandbox.files.watch("/tmp/watched") as changes:
        await text(sandbox, "cd /tmp/watched; echo x > a; mkdir new; mv a b; rm b")
        seen = []
        async with asyncio.timeout(lab.s(20)):
            async for change in changes:
                seen.append((change.kind, os.path.basename(change.path)))
                if seen[-1] == ("removed", "b"):
                    break
    holds(("created", "a") in seen and ("created", "new") in seen, f"what was made was told: {seen}")
