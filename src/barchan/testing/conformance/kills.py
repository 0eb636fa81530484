"""A program of the guest's that tries the ways that a kernel has to a SIGKILL, each by a process on itself, its parent
or its child, and prints the names of those by which one ended.
"""

WAYS_TO_KILL = """
import ctypes, fcntl, os, resource, signal, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": {
        "tkill": 200, "tgkill": 234, "kill": 62, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "clone": 56,
        "pidfd_send_signal": 424, "clone3": 435, "timer_create": 222, "timer_settime": 223, "ptrace": 101,
    },
    "aarch64": {
        "tkill": 130, "tgkill": 131, "kill": 129, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "clone": 220,
        "pidfd_send_signal": 424, "clone3": 435, "timer_create": 107, "timer_settime": 110, "ptrace": 117,
    },
}[os.uname().machine]
def call(name, *arguments): return libc.syscall(NUMBERS[name], *(ctypes.c_long(one) for one in arguments))
def event(): return (ctypes.c_int32 * 16)(0, 0, 9, 0)  # sigev_value, sigev_signo, sigev_notify: SIGEV_SIGNAL
def info(): return (ctypes.c_int32 * 32)(9, 0, -1)
me, A_CHILD = os.getpid, 99
def by_kill(): os.kill(me(), 9)
def by_group(): os.setpgid(0, 0); os.killpg(0, 9)
def by_tkill(): call("tkill", me(), 9)
def by_tgkill(): call("tgkill", me(), me(), 9)
def by_wide_number(): call("kill", me(), 9 | 1 << 32)
def by_thread(): threading.Thread(target=by_kill).start(); time.sleep(0.2)
def by_child():
    parent = me()
    if os.fork() == 0:
        os.kill(parent, 9)
        os._exit(0)
    os.wait()
def by_queue():
    told = info()
    call("rt_sigqueueinfo", me(), 9, ctypes.addressof(told))
def by_thread_queue():
    told = info()
    call("rt_tgsigqueueinfo", me(), me(), 9, ctypes.addressof(told))
def by_pidfd(): call("pidfd_send_signal", os.pidfd_open(me()), 9, 0, 0)
def by_childs_end():
    if call("clone", 9, 0, 0, 0, 0) == 0:
        os._exit(0)
    time.sleep(0.2)
def by_childs_end_in_memory():
    told = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 9)
    if call("clone3", ctypes.addressof(told), 64) == 0:
        os._exit(0)
    time.sleep(0.2)
def by_timer():
    told, made = event(), ctypes.c_int()
    if call("timer_create", 1, ctypes.addressof(told), ctypes.addressof(made)) == 0:
        soon = (ctypes.c_int64 * 4)(0, 0, 0, 1000000)
        call("timer_settime", made.value, 0, ctypes.addressof(soon), 0)
        time.sleep(0.3)
def by_readiness():
    reader, writer = os.pipe()
    fcntl.fcntl(reader, 10, 9)
    fcntl.fcntl(reader, fcntl.F_SETOWN, me())
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
    time.sleep(0.2)
def by_tracer():
    parent = me()
    if os.fork() == 0:
        call("ptrace", 16, parent, 0, 0)
        os.waitpid(parent, 0x40000000)
        call("ptrace", 7, parent, 0, 9)
        os._exit(0)
    time.sleep(0.5)
def by_parents_end():
    libc.prctl(36, 1, 0, 0, 0)
    reader, writer = os.pipe()
    if os.fork() == 0:
        child = os.fork()
        if child == 0:
            libc.prctl(1, 9, 0, 0, 0)
            os.write(writer, b"x")
            time.sleep(0.2)
            os._exit(0)
        os.read(reader, 1)
        os._exit(0)
    ends = [os.wait()[1] & 127 for _ in range(2)]
    os._exit(A_CHILD if 9 in ends else 0)
def by_limit(): resource.setrlimit(resource.RLIMIT_CPU, (1, 1)); burn()
def by_limit_of_a_process(): resource.prlimit(me(), resource.RLIMIT_CPU, (1, 1)); burn()
def burn():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    until = time.process_time() + 1.5
    while time.process_time() < until: pass
def by_strictness(): libc.prctl(22, 1, 0, 0, 0); os.getppid()
def of(way):
    pid = os.fork()
    if pid == 0:
        try:
            way()
        except (OSError, ValueError):
            pass
        os._exit(0)
    return os.waitpid(pid, 0)[1]
print(*(name for name, way in list(globals().items()) if name.startswith("by_") and of(way) in (9, A_CHILD << 8)))
"""
