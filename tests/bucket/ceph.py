"""A Ceph of a test: a monitor, three OSDs, and two gateways that speak S3, all on 127.0.0.1.

`python -m tests.bucket.ceph COMMAND ...` starts one, runs the command, which finds a bucket by
PERCOLATOR_TEST_BUCKET and its credentials by AWS_ACCESS_KEY_ID, and stops it. Rules, each with the
failure that it prevents:

- Everything is in a new directory, and listens on ports that were free. Otherwise, two of them, or
  a Ceph of the machine itself, would share data, or stop one another.
- Processes run in the foreground, as children, and the kernel kills them when this process ends,
  however it does. Otherwise, a test run that is killed would leave a gigabyte of them behind.
- They are started by the main thread. Otherwise, the kernel would kill them when the thread ends
  that has started them.
- A gateway's port is below those that the kernel gives to outgoing connections. Otherwise, one of
  them might have it when a gateway that was killed is started again.
- There is no manager: nothing here needs statistics, and it would need half as much memory as the
  rest.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import md5
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import obstore
from obstore.store import S3Store

from percolator.bucket.place import BucketPlace

OSDS = 3
GATEWAYS = 2
REGION = "us-east-1"
_START_SECONDS = 60.0
_COMMAND_SECONDS = 30.0
_CRASHES_MAX = 5
_ON_STORE = ("master", "oracle", "tabletserver")
_PORTS = range(10_000, 30_000)
_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "setpriv")

_CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{port}
public_network = 127.0.0.0/8
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
auth_allow_insecure_global_id_reclaim = false
# Without it, clients without keys wait for ever.
ms_mon_client_mode = crc
ms_bind_msgr1 = false
osd_pool_default_size = {osds}
osd_pool_default_min_size = 2
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
# Three copies on one machine.
osd_crush_chooseleaf_type = 0
# An OSD that is killed is noticed at once. One that is silent may lack the processor.
osd_heartbeat_interval = 1
osd_heartbeat_grace = 10
mon_osd_min_down_reporters = 1
# For so long, new buckets and accounts wait for a gateway that was killed.
osd_client_watch_timeout = 3
# Other programs may have filled the disk.
mon_data_avail_warn = 2
mon_data_avail_crit = 1
mon_osd_full_ratio = .97
mon_osd_backfillfull_ratio = .96
mon_osd_nearfull_ratio = .95
run_dir = {directory}
admin_socket =
crash_dir = {directory}
keyring = {directory}/keyring
mon_data = {directory}/mon
osd_data = {directory}/osd.$id
rgw_data = {directory}/rgw
log_file = {directory}/$name.log
mon_cluster_log_file = {directory}/cluster.log
log_to_stderr = false
err_to_stderr = true
[osd]
osd_objectstore = bluestore
bluestore_block_size = 4294967296
bluestore_cache_size = 67108864
bluestore_cache_autotune = false
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
[client]
rgw_thread_pool_size = 64
rgw_enable_usage_log = false
rgw_enable_ops_log = false
rgw_dynamic_resharding = false
"""


class CephError(Exception):
    """The store did not start, or a command of it failed."""


class CephCrash(CephError):
    """A command was ended by a signal."""


@dataclass(frozen=True)
class Account:
    """An account of the gateways."""

    access_key_id: str
    secret: str

    def environment(self) -> dict[str, str]:
        """Variables by which the driver finds the account, and nothing else."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return kept | {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "NO_PROXY": "127.0.0.1",
        }


class Ceph:
    """A store that has started. Single parts of it can be killed, and started again."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        """Its processes end with `stack`, also if it does not start."""
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._changing = threading.Lock()
        """Held while a part is killed: another thread may look whether all of them run."""
        stack.callback(self._end)
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("CEPH_")
        } | {"CEPH_CONF": str(directory / "ceph.conf")}
        monitor, *self._gateway_ports = _free_ports(1 + GATEWAYS)
        self.monitor_address = f"http://127.0.0.1:{monitor}"
        """Where something listens that does not speak S3."""
        fsid = str(uuid.uuid4())
        (directory / "ceph.conf").write_text(
            _CONFIGURATION.format(fsid=fsid, port=monitor, osds=OSDS, directory=directory)
        )
        self._epochs: dict[int, int] = {}
        """The map of OSDs in which one that was started again was up before."""

        _told("starting a monitor")
        self._start_monitor(fsid, monitor)
        _told(f"starting {OSDS} OSDs")
        self._create_osds()
        self.wait_for_osds()
        _told(f"starting {GATEWAYS} gateways")
        self.account = self.new_account("percolator")
        for number in range(GATEWAYS):
            self.start_gateway(number)
        self.wait_for_gateways()
        _told(f"ready, with {self.memory_mib()} MiB")

    # ------------------------------------------------------------------ parts

    def kill_osd(self, number: int) -> None:
        """kill -9."""
        self._epochs[number] = self._osds_up()[number]
        self._kill(f"osd.{number}")

    def start_osd(self, number: int) -> None:
        """Starts it on the disk that it had."""
        self._start(f"osd.{number}", "ceph-osd", "-i", str(number))

    def wait_for_osds(self) -> None:
        """Returns when all OSDs serve, those that were killed with a new life."""

        def are_up() -> bool:
            up = self._osds_up()
            return len(up) == OSDS and all(
                up[number] > epoch for number, epoch in self._epochs.items()
            )

        self._wait("the OSDs do not serve", are_up)

    def kill_gateway(self, number: int) -> None:
        """kill -9."""
        self._kill(f"rgw.{number}")

    def pause_gateway(self, number: int) -> None:
        """SIGSTOP: connections to it stay, and nothing answers. Returns when it stands still."""
        process = self._running[f"rgw.{number}"]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume_gateway(self, number: int) -> None:
        """SIGCONT."""
        self._running[f"rgw.{number}"].send_signal(signal.SIGCONT)

    def start_gateway(self, number: int) -> None:
        """Starts it at the port that it had."""
        # Without tcp_nodelay, small answers take 40 ms.
        frontend = f"beast endpoint=127.0.0.1:{self._gateway_ports[number]} tcp_nodelay=1"
        self._start(
            f"rgw.{number}", "radosgw", "-n", f"client.rgw.{number}", f"--rgw-frontends={frontend}"
        )

    def wait_for_gateways(self) -> None:
        """Returns when all gateways serve."""
        for number in range(GATEWAYS):
            self._wait(f"gateway {number} does not serve", partial(self._serves, number))

    def endpoint(self, gateway: int = 0) -> str:
        """The address at which a gateway speaks S3."""
        return f"http://127.0.0.1:{self._gateway_ports[gateway]}"

    def memory_mib(self) -> int:
        """Memory of all processes together."""
        pages = (Path(f"/proc/{one.pid}/statm").read_text() for one in self._running.values())
        return sum(int(one.split()[1]) for one in pages) * os.sysconf("SC_PAGE_SIZE") >> 20

    # ------------------------------------------------------------------ accounts and buckets

    def new_account(self, name: str) -> Account:
        """An account that may make buckets, and do everything with those that it has made."""
        account = Account(f"{name}-key", uuid.uuid4().hex)
        create = (
            "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}",
            f"--access-key={account.access_key_id}", f"--secret-key={account.secret}",
        )  # fmt: skip
        for _ in range(_CRASHES_MAX):
            with suppress(CephCrash):
                self.run(*create)
                return account
            # It does not survive an OSD that takes up its work in that moment. The account may be
            # there, or not.
            with suppress(CephError):
                self.run("radosgw-admin", "user", "rm", f"--uid={name}")
        raise CephError(f"{' '.join(create)}: ended by a signal {_CRASHES_MAX} times")

    def remove_key(self, account: Account) -> None:
        """From now on, the gateways do not know the account's key."""
        self.run(
            "radosgw-admin", "key", "rm", f"--access-key={account.access_key_id}", "--key-type=s3"
        )  # fmt: skip

    def new_bucket(self, name: str = "") -> BucketPlace:
        """An empty bucket of `self.account`."""
        bucket = name or f"bucket-{uuid.uuid4().hex}"
        self.configure(bucket, "x-new", b"")
        return self.place(bucket)

    def place(self, bucket: str, gateway: int = 0) -> BucketPlace:
        """Where a bucket is, by one of the gateways."""
        return BucketPlace(bucket, "some/prefix", self.endpoint(gateway), REGION)

    def nearest(self, place: BucketPlace, name: str, service: str) -> list[str]:
        """Arguments by which every other process of a cluster reaches its store by the other
        gateway: while one of them is dead, some processes work, and some do not."""
        if service not in _ON_STORE or name[-1] not in "2468":
            return []
        return ["--store", str(replace(place, endpoint=self.endpoint(1)))]

    def configure(self, bucket: str, setting: str, body: bytes) -> None:
        """Puts a setting of a bucket. obstore cannot do this, but it signs the address."""
        store = S3Store(
            bucket,
            config={
                "endpoint": f"{self.endpoint()}/{bucket}?{setting}=&x-test=",
                "virtual_hosted_style_request": True,
                "access_key_id": self.account.access_key_id,
                "secret_access_key": self.account.secret,
                "region": REGION,
            },
            client_options={"allow_http": True},
        )
        signed = obstore.sign(store, "PUT", "", timedelta(seconds=_COMMAND_SECONDS))
        checksum = b64encode(md5(body).digest()).decode()
        request = Request(signed, body, {"Content-MD5": checksum}, method="PUT")
        try:
            _opener.open(request, timeout=_COMMAND_SECONDS).close()
        except HTTPError as error:
            raise CephError(f"{setting} of {bucket}: {error}: {error.read().decode()}") from error

    # ------------------------------------------------------------------ processes

    def run(self, *command: str) -> str:
        """The output of a command that has succeeded."""
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            kind = CephCrash if error.returncode < 0 else CephError
            raise kind(f"{' '.join(command)}: {error.stderr}") from error
        except subprocess.TimeoutExpired as error:
            raise CephError(f"{' '.join(command)}: not done in {_COMMAND_SECONDS:g} s") from error
        return done.stdout

    def _start_monitor(self, fsid: str, port: int) -> None:
        monitors = str(self._directory / "monmap")
        (self._directory / "keyring").touch()
        (self._directory / "mon").mkdir()
        self.run(
            "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"v2:127.0.0.1:{port}",
            monitors,
        )  # fmt: skip
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)
        self._start("mon.a", "ceph-mon", "-i", "a")

    def _create_osds(self) -> None:
        preparing: list[str] = []
        for _ in range(OSDS):
            disk = str(uuid.uuid4())
            number = self.run("ceph", "osd", "new", disk).strip()
            (self._directory / f"osd.{number}").mkdir()
            name = f"osd.{number}"
            self._start(name, "ceph-osd", "-i", number, "--mkfs", "--osd-uuid", disk)
            preparing.append(name)
        for name in preparing:
            code = self._running.pop(name).wait(_START_SECONDS)
            if code:
                raise CephError(f"{name} was not prepared: it ended with {code}: {self._log(name)}")
        for osd in range(OSDS):
            self.start_osd(osd)

    def _start(self, name: str, *command: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("only the main thread may start processes")
        with (self._directory / f"{name}.output").open("ab") as output:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command, "-f"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for those who use the store
            )

    def _kill(self, name: str) -> None:
        self._require_running()
        with self._changing:
            process = self._running.pop(name)
            process.kill()
            process.wait()

    def _end(self) -> None:
        for process in self._running.values():
            process.kill()  # the data is deleted anyway
        for process in self._running.values():
            process.wait()

    def _osds_up(self) -> dict[int, int]:
        """For each that is up, by its number: the map since which it is."""
        found = json.loads(self.run("ceph", "osd", "dump", "--format=json"))["osds"]
        return {one["osd"]: one["up_from"] for one in found if one["up"]}

    def _serves(self, gateway: int) -> bool:
        try:
            _opener.open(self.endpoint(gateway), timeout=_COMMAND_SECONDS).close()
        except HTTPError:
            return True
        except OSError:
            return False
        return True

    def _wait(self, unless: str, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not is_done():
            self._require_running()
            if time.monotonic() > deadline:
                logs = "\n".join(self._log(name) for name in self._running)
                raise CephError(f"{unless} after {_START_SECONDS:g} s\n{logs}")
            time.sleep(0.1)

    def _require_running(self) -> None:
        with self._changing:
            ended = [one for one in self._running.items() if one[1].poll() is not None]
        for name, process in ended:
            raise CephError(f"{name} ended with {process.returncode}: {self._log(name)}")

    def _log(self, name: str) -> str:
        """The last lines that a process has written."""
        lines = (self._directory / f"{name}.output").read_text(errors="replace").splitlines()
        return "\n".join([f"{name}:", *lines[-10:]])


@contextmanager
def started_ceph() -> Iterator[Ceph]:
    """Starts a store, and yields it when it serves; stops it, and deletes everything."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise CephError(f"not installed: {', '.join(missing)}: run tests/bucket/ensure-ceph")
    with TemporaryDirectory(prefix="percolator-ceph-") as directory, ExitStack() as stack:
        yield Ceph(Path(directory), stack)


_opener = build_opener(ProxyHandler({}))
"""Nothing here is to be asked of a proxy."""


def _free_ports(count: int) -> list[int]:
    """Ports at which nothing listens, and that the kernel gives to nobody."""
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(_PORTS.start, min(_PORTS.stop, given_from)))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise CephError(f"no {count} free ports in {_PORTS}")


def _told(text: str) -> None:
    sys.stderr.write(f"ceph: {text}\n")
    sys.stderr.flush()


def main(command: list[str]) -> int:
    """Returns the exit code of the command."""
    if not command:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with started_ceph() as store:
        place = store.new_bucket()
        # A terminal's Ctrl-C reaches the command as well, and that decides when to end.
        signal.signal(signal.SIGINT, lambda *_: None)
        environment = store.account.environment() | {"PERCOLATOR_TEST_BUCKET": str(place)}
        with subprocess.Popen(command, env=environment) as running:
            signal.signal(signal.SIGTERM, lambda *_: running.terminate())
            return running.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
