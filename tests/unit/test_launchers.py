"""Test that environment variables identify launchers, and that the Slurm example works."""

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from sparsync.errors import ConfigurationError
from sparsync.transports import launchers, mpi
from sparsync.transports.launchers import (
    Placement,
    connect_mpi,
    detect,
    first_host,
    init_process_group,
    slurm_port,
)
from tests.fresh import run_python
from tests.tables import cases, refused, refuses

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples" / "slurm.sbatch"

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
MPICH_ELSEWHERE = {"PMI_RANK": "2", "PMI_SIZE": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "PMIX_RANK": "5"}
OPEN_MPI["OMPI_COMM_WORLD_LOCAL_RANK"] = "1"
MVAPICH = {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}
SLURM["SLURM_NODELIST"] = "node[003-005,9]"
IN_STEP = {**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node9"}
SCRIPT = {**SLURM, "SLURM_SUBMIT_DIR": "/"}


@cases(
    ({}, None),
    ({"RANK": "1"}, None),
    (TORCHRUN, Placement(1, 3, 1, "a", "torchrun")),
    (MPICH, Placement(2, 4, 0, None, "mpi")),
    (OPEN_MPI, Placement(5, 6, 1, None, "mpi")),
    (MVAPICH, Placement(0, 2, 0, None, "mpi")),
    (SLURM, Placement(3, 8, 1, "node003", "slurm")),
    # a step with fewer tasks than the job, on other hosts
    (IN_STEP, Placement(3, 4, 1, "node9", "slurm")),
    ({**SLURM, "PMIX_RANK": "2"}, Placement(2, 8, 1, "node003", "mpi")),
    ({**SLURM, "MASTER_ADDR": "b"}, Placement(3, 8, 1, "b", "slurm")),
    # without MPI_LOCALRANKID, as under srun --mpi=pmi2 and under Cray's PALS
    ({**SLURM, **MPICH_ELSEWHERE}, Placement(2, 4, 1, "node003", "mpi")),
    ({**MPICH_ELSEWHERE, "PMI_LOCAL_RANK": "3"}, Placement(2, 4, 3, None, "mpi")),
    # one launcher inside another: the inner one takes precedence
    ({**SLURM, **MPICH}, Placement(2, 4, 0, "node003", "mpi")),
    ({**SLURM, **MPICH, **TORCHRUN}, Placement(1, 3, 1, "a", "torchrun")),
    # the batch script itself, and what srun starts in it
    (SCRIPT, None),
    ({**SCRIPT, "SLURM_STEP_ID": "0"}, Placement(3, 8, 1, "node003", "slurm")),
)
def test_detect(environ, expected):
    assert detect(environ) == expected


@refuses(
    ({**MPICH, "PMI_RANK": "4"}, "PMI_RANK=4 and PMI_SIZE=4 make no sense"),
    ({**MPICH, "PMI_SIZE": "many"}, "PMI_SIZE is 'many'"),
    ({**SLURM, "SLURM_NODELIST": "node[3"}, r"SLURM_NODELIST is 'node\[3'"),
)
def test_detect_refuses_what_makes_no_sense(environ):
    detect(environ)


@cases(
    ("node1", "node1"),
    ("node[003-005,9]", "node003"),
    ("node[9,003-005]", "node9"),
    ("gpu-a[1-2]-ib,login", "gpu-a1-ib"),
    ("rack[1-2]node[07-08,10]", "rack1node07"),
    ("a,b[1-2]", "a"),
    ("host.example.org", "host.example.org"),
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",a", "node[", "node[a-b]", "node[]", "a b", "node]1["])
def test_first_host_refuses(nodes):
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        first_host(nodes)


def test_the_port_is_equal_in_a_step_and_another_in_the_next_job():
    jobs = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"} for job in range(500, 600)]
    ports = [*map(slurm_port, jobs)]
    assert len(set(ports)) == 100
    assert all(1024 < port < 32768 for port in ports)  # none that the system gives out


# ---- one clear line --------------------------------------------------------------------------------


def test_no_launcher(monkeypatch):
    for name in {**TORCHRUN, **MPICH, **OPEN_MPI, **MVAPICH, **SLURM}:
        monkeypatch.delenv(name, raising=False)
    with refused("torchrun, mpiexec or srun"):
        init_process_group()


def test_an_mpi_that_is_missing_is_named_with_what_to_install(monkeypatch):
    def missing(name):
        raise RuntimeError("cannot load MPI library\nlibmpi.so.12: no such file")

    monkeypatch.setattr(mpi.importlib, "import_module", missing)
    with refused("pip install 'sparsync[mpi]'", "cannot load MPI library"):
        connect_mpi()


def test_ranks_that_cannot_know_where_rank_0_is(monkeypatch):
    for name, value in MPICH.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    with refused("set MASTER_ADDR and MASTER_PORT"):
        init_process_group()


# ---- the Slurm example -----------------------------------------------------------------------------

FAKE_SRUN = """#!{python}
import os, subprocess, sys
tasks = int(os.environ["SLURM_NTASKS"])
options = [a for a in sys.argv[1:] if a.startswith("--") and sys.argv.index(a) < sys.argv.index("python")]
command = sys.argv[1 + len(options):]
print("options", *options, flush=True)
ranks = []
for rank in range(tasks):
    step = dict(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_STEP_ID="0",
                SLURM_STEP_NUM_TASKS=str(tasks), SLURM_STEP_NODELIST=os.environ["SLURM_NODELIST"])
    ranks.append(subprocess.Popen(command, env={{**os.environ, **step}}))
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def free_job() -> str:
    """Return the number of a job whose port is free."""
    for job in range(os.getpid() % 5000, 10_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", slurm_port({"SLURM_JOB_ID": str(job)})))
            except OSError:
                continue
        return str(job)
    raise AssertionError("no free port")


def test_the_directives_of_the_batch_script():
    text = SBATCH.read_text()
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert set(given) >= {"nodes", "ntasks-per-node", "cpus-per-task", "time"}
    assert int(given["nodes"]) * int(given["ntasks-per-node"]) > 1
    # Slurm reads directives only up to the first command
    first_command = text.index("\nset -")
    assert text.rindex("#SBATCH") < first_command
    assert text.startswith("#!/bin/bash\n")
    assert subprocess.run(["bash", "-n", SBATCH], check=False).returncode == 0


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(330)
def test_the_batch_script_trains_under_srun(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(FAKE_SRUN.format(python=sys.executable))
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "VIRTUAL_ENV"))}
    environ["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # as sbatch sets them in the script
    environ |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "127.0.0.1"}
    environ |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "1"}
    environ["SLURM_JOB_ID"] = free_job()
    script = tmp_path / "slurm_script"  # Slurm runs a copy
    script.write_text(SBATCH.read_text())
    command = ["bash", script, "--steps", "12", "--transport", "torch", "--timeout", "60"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "options --kill-on-bad-exit=1 --cpus-per-task=1" in done.stdout
    found = re.search(r"^2 ranks, 12 steps: .* replicas equal: (\w+)$", done.stdout, re.M)
    assert found, done.stdout
    assert found[1] == "True"


def test_leaving_ends_the_threads_of_gloo(tmp_path):
    """The threads end even if a reference cycle holds the group; otherwise, the exit might abort."""
    program = tmp_path / "leave.py"
    program.write_text(
        "import gc, pathlib, torch, torch.distributed as dist\n"
        "from sparsync.transports.launchers import destroy_process_group\n"
        "from sparsync.transports.process_group import TorchCommunicator\n"
        "gc.disable()\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "comm = TorchCommunicator(dist.group.WORLD)\n"
        "comm.itself = comm\n"
        "dist.all_reduce(torch.ones(10))\n"
        "del comm\n"
        "destroy_process_group()\n"
        "names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "print('gloo' in ''.join(names))\n"
    )
    assert run_python(program).stdout == "False\n"


def test_ranks_that_torchrun_restarts_do_not_find_what_the_former_ones_stored(monkeypatch):
    """torchrun's static rendezvous keeps its store; torch itself connects to ranks that have ended."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }.items():
        monkeypatch.setenv(name, value)
    for restarts in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        store = launchers._meet(detect(), 5.0)
        assert not store.check(["address of rank 0"])
        store.set("address of rank 0", "here")
        assert launchers._meet(detect(), 5.0).check(["address of rank 0"])
