"""Jobs of [slurm]: the script and `stretto status|logs|stop`."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.base import rundir
from stretto.base.paths import RunDir
from stretto.cli import main
from stretto.config.load import load
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto_clusters.job import RESUME
from stretto_clusters.placed import node_names
from stretto_clusters.slurm.rules import seconds
from stretto_clusters.slurm.script import Job, fill, plan_job
from stretto_clusters.slurm.submit import screen, write

RL = """
[model]
name = "org/Model"
[[orchestrator.env]]
id = "sort-letters"
[run]
name = "r"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_replicas = 2
[slurm]
"""
SFT = 'max_steps = 2\n[data]\ntype = "environment"\nid = "sort-letters"\n[run]\nname = "r"\n[slurm]\n'

GOLDEN = """\
#!/bin/bash
#SBATCH --job-name=r
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --chdir=CWD
#SBATCH --output=OUT/r/slurm/job.log
#SBATCH --open-mode=append
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR2@600
#SBATCH --partition=gpus
#SBATCH --time=1-12:00:00
#SBATCH --constraint=h200
#SBATCH --contiguous
set -eu
run=OUT/r
export STRETTO_JOB=$SLURM_JOB_ID STRETTO_FINISH="$run"/slurm/finish
rm -f "$STRETTO_FINISH"
again=
trap 'again=yes; touch "$STRETTO_FINISH" || true; scancel --signal=USR2 "$SLURM_JOB_ID" || true' USR2
start=
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    if compgen -G "$run/checkpoints/step_*/COMPLETE" >/dev/null
    then start="--resume --resume.step None --resume.dir None --resume.skip-progress false"
    else start=--clean
    fi
fi
PYTHON -m stretto_clusters.slurm.steps --lead 2 --each 1 bash -c 'trap "" USR2
    if ! [ -r "$0" ]; then
        echo "error: $(hostname) does not see $0: output_dir must be on a file system that all nodes share" >&2; exit 2
    fi
    module load cuda
    export A='\\''b c'\\''
    exec "$@"' "$run"/slurm/rl.json -- \\
    PYTHON -m stretto rl @ "$run"/slurm/rl.json \\
    --deployment.hosts $(scontrol show hostnames "$SLURM_JOB_NODELIST") $start &
while kill -0 $! 2>/dev/null; do wait $! || true; done  # a signal interrupts the wait
status=0
wait $! || status=$?
case $again$status in yes0 | yes140) scontrol requeue "$SLURM_JOB_ID" || true;; esac  # 140: by that signal
exit $status
"""


def rl(folder: Path, slurm: str = "", *words: str) -> RLConfig:
    (folder / "rl.toml").write_text(RL + slurm)
    return load(RLConfig, ["@", str(folder / "rl.toml"), "--output-dir", str(folder / "out"), *words])


def test_the_script_is_this_one(tmp_path: Path) -> None:
    slurm = 'partition = "gpus"\ntime = "1-12:00:00"\npre_run_command = """module load cuda\nexport A=\'b c\'"""\n'
    job = plan_job(rl(tmp_path, slurm + 'extra = { constraint = "h200", contiguous = true, overcommit = false }'))
    places = {"PYTHON": sys.executable, "CWD": str(Path.cwd()), "OUT": str(tmp_path / "out")}
    wanted = GOLDEN
    for name, place in places.items():
        wanted = wanted.replace(name, place)
    assert job.script == wanted
    assert subprocess.run(["bash", "-n"], input=job.script, text=True).returncode == 0


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_job_that_is_started_again_resumes_or_begins_anew(tmp_path: Path, is_saved: bool) -> None:
    """The script in a shell whose srun says how it is called."""
    job = plan_job(rl(tmp_path, "", "--deployment.num-infer-replicas", "1"))
    assert "--no-kill" not in job.script, "the run needs every node"
    if is_saved:
        step = job.run.complete_marker(3)
        step.parent.mkdir(parents=True)
        step.touch()
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, text in {"srun": 'echo "$@"', "scontrol": "echo a b c"}.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)
    words = {}
    for restarts in ("0", "1"):
        env = {"PATH": f"{bin_}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
        env["SLURM_JOB_NODELIST"] = "a,b,c"
        ended = subprocess.run(["bash", "-c", job.script], env=env, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        words[restarts] = ended.stdout.split("--deployment.hosts ")[1].strip()
    again = "--resume --resume.step None --resume.dir None --resume.skip-progress false" if is_saved else "--clean"
    assert words == {"0": "a b c", "1": f"a b c {again}"}


def test_a_job_runs_in_the_directory_of_the_project(tmp_path: Path) -> None:
    script = plan_job(rl(tmp_path, f'project_dir = "{tmp_path}/theirs"\n')).script
    assert f"#SBATCH --chdir={tmp_path}/theirs\n" in script


def test_a_run_that_began_anew_with_anothers_weights_is_continued_at_its_own_step(tmp_path: Path) -> None:
    begun = ["--resume.dir", "outputs/first", "--resume.skip-progress"]
    cfg = rl(tmp_path, "", *begun, *RESUME.split())
    assert cfg.resume is not None and (cfg.resume.dir, cfg.resume.skip_progress) == (None, False)


@pytest.mark.parametrize(
    "restart", ["--resume --resume.step None --resume.dir None --resume.skip-progress false", "--clean"]
)
def test_the_config_of_the_job_loads_on_a_node(tmp_path: Path, restart: str) -> None:
    cfg = rl(tmp_path, "", "--resume.dir", "elsewhere", "--resume.step", "4")
    job = plan_job(cfg)
    write(job, cfg)
    assert job.script_file.read_text() == job.script
    words = ["@", str(job.config_file), "--deployment.hosts", "a", "b", "c", "d", *restart.split()]
    found = load(RLConfig, words)
    assert found.slurm is None and found.run_path == tmp_path / "out" / "r"
    assert found.deployment.hosts == ["a", "b", "c", "d"] and found.model == cfg.model
    assert found.resume is not None
    wanted = (4, Path("elsewhere"), True) if restart == "--clean" else (None, None, False)
    assert (found.resume.step, found.resume.dir, found.clean) == wanted


def test_a_node_gets_the_gpus_that_its_processes_take(tmp_path: Path) -> None:
    for slurm, words, gpus in (
        ("", ["--deployment.gpus-per-node", "4"], 4),
        ("", ["--deployment.gpus-per-node", "2", "--inference.device", "cpu"], 2),
        ("", ["--deployment.gpus-per-node", "0", "--inference.device", "cpu"], 0),
    ):
        job = plan_job(rl(tmp_path, slurm, *words))
        assert job.num_gpus == gpus and (f"gpu:{gpus}\n" in job.script) == bool(gpus)
    (tmp_path / "sft.toml").write_text(SFT)
    job = plan_job(load(SFTConfig, ["@", str(tmp_path / "sft.toml"), "--trainer-gpu-ids", "0,1"]))
    assert (job.num_nodes, job.num_gpus) == (1, 2) and "--deployment.hosts" not in job.script
    words = ["--model", "m", "--run.name", "s", "--parallel.tp", "8", "--slurm.partition", "p"]
    cfg = load(InferenceConfig, [*words, "--deployment.type", "multi_node", "--deployment.num-nodes", "3"])
    job = plan_job(cfg)
    assert (job.verb, job.num_nodes, job.num_gpus) == ("inference", 3, 8)
    assert "--hosts $(scontrol" in job.script and "--signal=B" not in job.script and "--clean" not in job.script


def test_lists_of_nodes_are_read_as_slurm_does() -> None:
    assert node_names("n[0-2,07],big") == ["n0", "n1", "n2", "n07", "big"]
    assert node_names("rack1-n[08-11]") == ["rack1-n08", "rack1-n09", "rack1-n10", "rack1-n11"]
    assert node_names("") == []


def test_times_are_read_as_slurm_does() -> None:
    times = {"90": 5400, "1:30": 90, "2:00:00": 7200, "1-12": 129600, "1-00:30": 88200, "1-00:00:05": 86405}
    assert {time: seconds(time) for time in times} == times
    assert seconds("UNLIMITED") == float("inf")


def test_gpus_that_are_asked_for_and_not_used_are_said(tmp_path: Path) -> None:
    cfg = rl(tmp_path, 'gres = "gpu:h200:8"')
    assert "--gres=gpu:h200:8\n" in plan_job(cfg).script and "note:" not in screen(cfg)
    more = screen(rl(tmp_path, 'gres = "gpu:h200:8"', "--deployment.gpus-per-node", "2"))
    assert "note: slurm.gres = gpu:h200:8 gives a node 8 GPUs, and its processes use 2 of them" in more


def test_a_template_of_ones_own_gets_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "job.template"
    path.write_text("#!/bin/sh\n{{options}}\nstart=\nrun={{ run }}\necho {{ job_name }} {{num_nodes}}\n{{ command }}\n")
    script = plan_job(rl(tmp_path, f'template_path = "{path}"')).script
    assert f"\necho r 4\n{sys.executable} -m stretto_clusters.slurm.steps " in script
    assert "#SBATCH --nodes=4\n" in script
    assert fill("{{ options }} {{ command }}", "it", {"options": "o", "command": "c"}) == "o c"


def test_a_dry_run_shows_the_script_and_submits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sft.toml").write_text(SFT + "[model]\nscratch = {}\n")
    words = ["@", str(tmp_path / "sft.toml"), "--output-dir", str(tmp_path), "--max-steps", "2", "--dry-run"]
    assert main(["sft", *words]) == 0
    shown = capsys.readouterr().out
    assert "--job-name=r " in shown and "no GPUs are named or counted" in shown
    script = tmp_path / "r" / "dry_run" / "slurm" / "job.sh"
    assert str(script.parent) in shown and "#SBATCH --job-name=r\n" in script.read_text()
    assert not (tmp_path / "r" / "slurm").exists()


# -- status, logs, stop --

HOLDER = "import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(os.getpid(), "
HOLDER += "file=f, flush=True); print('ready', flush=True); time.sleep(600)"


def hold(run: RunDir) -> subprocess.Popen[bytes]:
    """A process that has the run's lock, as a launcher has."""
    words = [sys.executable, "-c", HOLDER, str(run.lock)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def started_run(folder: Path, host: str) -> RunDir:
    run = RunDir(folder / "r")
    run.configs.mkdir(parents=True)
    run.logs.mkdir()
    run.config("run").write_text('{"max_steps": 9}')
    run.launch.write_text(json.dumps({"by": "local", "host": host}))
    run.log("orchestrator").write_text("".join(f"line {n}\n" for n in range(30)))
    run.log("trainer").write_text("of the trainer\n")
    run.metrics("orchestrator").parent.mkdir()
    run.metrics("orchestrator").write_text('{"step": 4, "reward": 1}\n')
    return run


def test_a_local_run_is_looked_at_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = started_run(tmp_path, socket.gethostname())
    assert main(["status", str(run)]) == 0
    assert "state  ended\n" in capsys.readouterr().out
    run.summary.write_text('{"steps": 4}')
    assert main(["status", str(run)]) == 0
    assert "state  stopped\n" in capsys.readouterr().out
    holder = hold(run)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        assert main(["status", str(run)]) == 0
        shown = capsys.readouterr().out
        assert f"running: process {holder.pid} on {socket.gethostname()}" in shown and "step   4 of 9, " in shown
        assert "logs   orchestrator, trainer\n" in shown
        assert main(["stop", str(run)]) == 0
        assert f"process {holder.pid} finishes its step" in capsys.readouterr().out
        assert holder.wait(60) != 0
    finally:
        holder.kill()
        holder.communicate()
    assert main(["stop", str(run)]) == 0
    assert "is not running" in capsys.readouterr().out


def test_a_run_of_another_host_is_stopped_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = started_run(tmp_path, "far-away")
    holder = hold(run)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        assert main(["stop", str(run)]) == 2
        assert f"runs on far-away; run `stretto stop {run}` there" in capsys.readouterr().err
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()


def test_logs_are_those_of_the_lead_or_of_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = started_run(tmp_path, "anywhere")
    node = RunDir(tmp_path / "r-node-1")
    node.logs.mkdir(parents=True)
    node.log("inference_0").write_text("of the engine\n")
    assert main(["logs", str(run), "-n", "2"]) == 0
    assert capsys.readouterr().out == "line 28\nline 29\n"
    assert main(["logs", str(run), "inference_0"]) == 0
    assert capsys.readouterr().out == "of the engine\n"
    assert main(["logs", str(run), "nobody"]) == 2
    assert "has no log 'nobody'; there are: inference_0, orchestrator, trainer." in capsys.readouterr().err
    (run.slurm).mkdir()
    (run.slurm / "job.log").write_text("of the job\n")
    assert main(["logs", str(run)]) == 0
    assert capsys.readouterr().out == "of the job\n"
    assert main(["status", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_a_job_that_begins_anew_keeps_what_it_is_started_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "r")
    run.slurm.mkdir(parents=True)
    (run.slurm / "rl.json").write_text("{}")
    run.launch.write_text('{"by": "slurm", "job": "7"}')
    options = {"resume": False, "step": None, "clean": True}
    monkeypatch.setenv("STRETTO_JOB", "7")
    rundir.claim(run, **options).close()  # killed before it wrote anything
    run.configs.mkdir()
    rundir.claim(run, **options).close()
    assert sorted(path.name for path in run.path.iterdir()) == ["launch.json", "run.lock", "slurm"]
    assert '"job": "7"' in run.launch.read_text() and (run.slurm / "rl.json").exists()
    monkeypatch.delenv("STRETTO_JOB")
    rundir.claim(run, **options).close()
    assert sorted(path.name for path in run.path.iterdir()) == ["launch.json", "run.lock"]
    assert '"by": "local"' in run.launch.read_text()


def test_a_plan_of_a_thousand_nodes_names_each_in_one_job(tmp_path: Path) -> None:
    words = ["--deployment.num-train-nodes", "200", "--deployment.num-infer-replicas", "800", "--batch-size", "1600"]
    words[-2] = "--orchestrator.batch-size"
    job: Job = plan_job(rl(tmp_path, "", *words, "--orchestrator.group-size", "8"))
    assert job.num_nodes == 1000 and "#SBATCH --nodes=1000\n" in job.script
    assert shlex.quote(str(job.run)) in job.script
