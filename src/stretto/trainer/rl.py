"""The trainer process of an `rl` run: receives batches, publishes versions of the policy.

    register with the orchestrator -> publish the version it starts from
    -> each step: wait for the batch, train, report the step, publish the new version if its batch says so, checkpoint
    -> at max_steps, Stop or Ctrl-C: checkpoint, publish the last version, wait until engines have loaded it, send Bye

The orchestrator sends Stop and completes checkpoints. Every wait for it has a deadline, and ends if the orchestrator
dies (transports/orchestrator.py). Training itself is learner.py.
"""

from __future__ import annotations

import logging
import runpy
import sys
import time
from collections import deque
from contextlib import ExitStack

import msgspec

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.runtime import freeze_objects
from stretto.base.status import report
from stretto.config.root import TrainerConfig
from stretto.config.sections.trainer import num_kept
from stretto.models.fp8.checkpoint import to_8_bits
from stretto.models.tracing.snapshots import MemorySnapshots
from stretto.models.tracing.tracer import Tracer
from stretto.monitors.base import MONITOR_CLOSE_S, build_monitors
from stretto.monitors.steps import StepClock
from stretto.records.control import Bye, CheckpointBegun, CheckpointSaved, Register, StepMetrics, VersionReady
from stretto.records.sample import TrainBatch
from stretto.records.weight_manifest import Canary
from stretto.trainer.batch.token_export import delete_after
from stretto.trainer.batch.token_record import TokenRecorder
from stretto.trainer.build import build_learner, find_engine_layout, token_folder
from stretto.trainer.colocated import TrainerMemory
from stretto.trainer.hooks import load_hooks
from stretto.trainer.learner import Learner, find_tokenizer
from stretto.trainer.process import StopFlag, rank_process
from stretto.trainer.publish.canary import is_canary_due, score_canary
from stretto.trainer.publish.export import export_weights, prune_exports
from stretto.trainer.ranks.mesh import rank_name
from stretto.trainer.state import checkpoint
from stretto.trainer.updates import Updates
from stretto.transports.meeting import with_orchestrator
from stretto.transports.orchestrator import Orchestrator
from stretto.transports.weights import build_publisher, meeting_host
from stretto.transports.weights.sums import GroupSums, merge_sums

logger = logging.getLogger(__name__)

ROLE = "trainer"
LOGGED = ("loss/mean", "mismatch_kl/mean", "entropy/mean", "optim/grad_norm", "optim/lr")


def main(cfg: TrainerConfig) -> int:
    """Train until max_steps, a Stop from the orchestrator, or the first Ctrl-C; the exit status."""
    reaches = meeting_host(cfg.weight_broadcast)
    with rank_process(cfg, ROLE, reaches=reaches) as interrupt, ExitStack() as stack:
        # A model that is not there is told before the wait.
        find_tokenizer(cfg.model, cfg.tokenizer, cfg.run_dir)
        cfg = with_orchestrator(cfg, lambda: interrupt.is_set)
        Trainer(cfg, interrupt, stack).run()
    return 0


class Trainer:
    """The training loop of one process and its connections.

    `stack` closes the connections in reverse order.

    On several ranks the lead exchanges messages with the orchestrator and writes metrics; it broadcasts to the others
    when to stop and what engines have loaded. Each rank publishes the tensors that it owns. One rank per data-parallel
    group registers and receives batches, and sends them to the ranks of its cp and tp axes.
    """

    def __init__(self, cfg: TrainerConfig, interrupt: StopFlag, stack: ExitStack) -> None:
        self.cfg, self.run_dir = cfg, cfg.run_dir
        self.interrupt, self.stack = interrupt, stack
        self.snapshots = MemorySnapshots(cfg.memory_profiler_path, rank_name(ROLE))
        self.tokenizer_dir = find_tokenizer(cfg.model, cfg.tokenizer, cfg.run_dir)
        self.hooks = load_hooks(cfg.hooks, self.run_dir)
        self.learner = build_learner(cfg, self.tokenizer_dir, self.hooks)
        self.mesh = mesh = self.learner.mesh
        self.valuer = self.learner.valuer
        if self.valuer is not None:
            self.valuer.connect()
        self.updates = Updates(self.learner, cfg, hooks=self.hooks)
        self.hooks.call("init")
        self.is_colocated = cfg.colocate is not None
        is_moved = cfg.colocate is not None and cfg.colocate.offload_train
        self.memory = TrainerMemory(self.learner, is_moved=is_moved)
        self.is_lead, self.dp_rank, self.dp = mesh.is_lead, mesh.dp_rank, mesh.degrees.dp
        self.layout = find_engine_layout(cfg)
        self.resumed_step = resume(cfg, self.learner)
        if self.is_lead:  # before the first step, which ranks begin when all have published
            delete_after(self.run_dir.trained_tokens, self.learner.step)
        self.is_batch_lead = mesh.is_batch_lead
        if self.is_batch_lead:
            self.orchestrator = Orchestrator(
                cfg, stack, self.learner.step, on_loaded=self.release, on_complete=self.prune
            )
        kept = cfg.keep_token_bytes
        self.recorder = TokenRecorder(token_folder(cfg, mesh), None if kept is None else kept // self.dp)
        self.stack.callback(self.recorder.close)
        self.learner.observers.append(self.recorder.add)
        self.tracer = Tracer(cfg.run_dir, rank_name(ROLE))
        self.num_published, self.published_version = 0, -1
        self.saved_step = self.exported_step = self.learner.step
        self.is_checkpoint_due = checkpoint.Due(cfg.ckpt, mesh)

    def open(self) -> None:
        """Open what writes into the run: weights, metrics, checkpoints; after registration."""
        self.publisher = build_publisher(self.cfg.weight_broadcast, self.run_dir, self.cfg.run_name, self.mesh)
        self.stack.callback(self.publisher.close)
        if self.is_lead:
            self.monitors = build_monitors(
                self.cfg.monitors,
                self.run_dir,
                ROLE,
                self.cfg.run_name,
                resumed_step=self.resumed_step,
                has_trackers=False,
            )
            self.stack.callback(self.monitors.close, MONITOR_CLOSE_S)
        self.written: deque[int] = deque()
        self.saver = checkpoint.build_saver(self.cfg, self.written.append)

    def run(self) -> None:
        """Train every step, then end the run; an error is reported to the orchestrator first."""
        if self.is_batch_lead:
            self.orchestrator.register(
                Register(
                    rank=self.dp_rank,
                    world_size=self.dp,
                    resumed_step=self.resumed_step,
                    version=self.learner.step,
                    shares_prefixes=self.learner.shares_prefixes,
                )
            )
        try:
            self.open()
            self.announce(self.publish())
            if self.valuer is not None:
                self.valuer.begin(self.learner.step)
            report("ready", is_early=True)
            freeze_objects()
            self.clock = StepClock()
            while self.learner.step != self.cfg.max_steps and (batch := self.next_batch()) is not None:
                self.memory.bring_back()
                step = self.learner.step + 1
                with self.tracer.step(step), self.snapshots.step(step):
                    metrics = self.train(batch)
                    ready = self.publish() if batch.is_sent else None
                    if not self.is_colocated:
                        self.announce(ready)
                self.log(metrics)
                self.save_if_due(is_last=self.is_colocated and self.learner.step == self.cfg.max_steps)
                if self.is_colocated:  # engines take memory as soon as the version is announced
                    self.announce(ready)
            self.end_run()
        except Exception as error:  # the orchestrator learns why, whatever it is
            if self.is_batch_lead:
                self.orchestrator.report_failure(error)
            raise
        if self.is_batch_lead:
            self.orchestrator.send(Bye())
        logger.info("done at step %d", self.learner.step)

    # -- a step --

    def next_batch(self) -> TrainBatch | None:
        """The batch of the next step; None if training should stop.

        The lead waits for its own; by then the orchestrator has sent the batches of all ranks.

        Raises: EngineError when none comes in batch_timeout_s.
        """
        self.wait_s = -time.perf_counter()
        step = self.learner.step + 1
        batch = self.orchestrator.receive(step, self.should_stop) if self.is_lead else None
        # A signal may reach any rank: one machine of several can be preempted.
        ranks = self.mesh.gather((batch is not None, self.interrupt.is_set), tuple[bool, bool])
        lead_has_batch = ranks[0][0]
        if not lead_has_batch or any(is_interrupted for _, is_interrupted in ranks):
            return None
        if self.is_batch_lead and not self.is_lead:
            batch = self.orchestrator.receive(step, lambda: False)
        batch = self.mesh.broadcast_batch(batch, TrainBatch | None)
        self.wait_s += time.perf_counter()
        return batch

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step, reported to the orchestrator; its metrics."""
        start = time.perf_counter()
        metrics = self.updates.train(batch.micro_batches)
        self.recorder.write(self.learner.step)
        train_s = time.perf_counter() - start
        num_tokens = sum(mb.num_tokens for mb in batch.micro_batches)
        counts = self.mesh.reduce({"tokens": num_tokens, "micro_batches": len(batch.micro_batches)})
        metrics |= self.clock.end_step(
            num_tokens=int(counts["tokens"]),
            num_micro_batches=counts["micro_batches"],
            wait_s=self.wait_s,
            train_s=train_s,
        )
        if self.is_lead:
            self.orchestrator.report_step(self.learner.step, metrics)
        return metrics

    def log(self, metrics: dict[str, float]) -> None:
        """Log the trained step to console and monitors, after its version is published."""
        if not self.is_lead:
            return
        step = self.learner.step
        self.monitors.log(step, metrics)
        logger.info(
            "step %d loss=%.4f mismatch_kl=%.2e entropy=%.3f grad_norm=%.3f lr=%.2e %.0f tokens/s %.3fs (waited %.3fs)",
            step,
            *(metrics.get(name, 0.0) for name in LOGGED),
            metrics["perf/throughput"],
            metrics["time/step"],
            self.wait_s,
        )

    def log_more(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics that are known after the step's report, here and in the orchestrator, which feeds trackers."""
        self.monitors.log(step, metrics)
        self.orchestrator.post(StepMetrics(step=step, metrics=metrics))

    def publish(self) -> VersionReady | None:
        """Publish the current weights as the version after the current step; on the lead, its announcement."""
        start = time.perf_counter()
        loaded_version, wants_canary = -1, True
        if self.is_lead:
            self.handle_messages()
            loaded_version, wants_canary = self.orchestrator.loaded_version, self.orchestrator.wants_canary
        loaded_version, wants_canary = self.mesh.broadcast((loaded_version, wants_canary), tuple[int, bool])
        self.release(loaded_version)
        is_checked, sums = self.is_canary_due(is_wanted=wants_canary), GroupSums()
        tensors, adapter = self.learner.export_tensors(), self.learner.adapter_info()
        if self.layout is not None:
            tensors = to_8_bits(tensors, self.layout)
        elif is_checked and adapter is None:  # engines keep other tensors of an adapter, and of weights in 8 bits
            tensors = sums.of(tensors)
        manifest = self.publisher.publish(self.learner.step, tensors)
        if self.is_lead:  # engines load the version afterwards
            self.hooks.call("post_write", manifest.location, [])
        canary = self.canary(sums) if is_checked else None
        self.num_published, self.published_version = self.num_published + 1, self.learner.step
        if not self.is_lead:
            return None
        manifest = msgspec.structs.replace(manifest, canary=canary, adapter=adapter)
        values = {"time/publish": time.perf_counter() - start, "publish/bytes": manifest.sent_bytes}
        self.log_more(self.learner.step, values)
        return VersionReady(manifest=manifest)

    def announce(self, ready: VersionReady | None) -> None:
        """Send the orchestrator the published version; with [colocate] all ranks put their memory away first."""
        self.memory.put_away()
        if self.is_colocated:
            self.mesh.barrier()
        if ready is not None:
            self.orchestrator.post(ready)

    def is_canary_due(self, *, is_wanted: bool) -> bool:
        """Whether engines are compared with this version."""
        interval, since = self.cfg.weight_broadcast.canary_interval, self.published_version
        return is_canary_due(self.learner.step, self.num_published, interval, is_wanted=is_wanted, since=since)

    def canary(self, sums: GroupSums) -> Canary:
        """What engines must reproduce with this version; sums: those of the tensors that this rank has published."""
        num_tokens, is_first = self.cfg.weight_broadcast.canary_tokens, self.num_published == 0
        canary = score_canary(self.learner, num_tokens, self.layout, with_probe=is_first)
        merged = merge_sums(self.mesh.gather(sums.by_group, dict[str, int]))
        return msgspec.structs.replace(canary, sums=merged)

    def save_if_due(self, *, is_last: bool = False) -> None:
        """Save a checkpoint and export weights if their intervals are due; both if is_last."""
        ckpt, step = self.cfg.ckpt, self.learner.step
        if ckpt is None or self.saver is None:
            return
        self.saver.check()
        start = time.perf_counter()
        is_saving = is_last or self.is_checkpoint_due(step)
        weights = ckpt.weights
        interval = (None if weights is None else weights.interval) or ckpt.interval
        is_exporting = is_last or checkpoint.is_interval_end(step, interval)
        if self.has_exports and is_exporting and step != self.exported_step:
            self.export(step)
        if is_saving and step != self.saved_step:
            self.learner.check_finite()
            if self.is_lead:
                self.orchestrator.send(CheckpointBegun(step=step))
            if self.valuer is not None:
                self.valuer.save()
            self.saver.save(self.learner)
            self.saved_step = step
        if is_last:
            self.saver.wait()
            if self.valuer is not None:
                self.valuer.flush()
        self.report_saved()
        if self.is_lead and step in (self.saved_step, self.exported_step):
            self.log_more(step, {"time/save_ckpt": time.perf_counter() - start})

    @property
    def has_exports(self) -> bool:
        """Are model directories written? A valuer's are with [ckpt] alone, if they have a place of their own."""
        has_place = self.valuer is not None and self.valuer.section.save is not None
        return self.cfg.ckpt is not None and (self.cfg.ckpt.weights is not None or has_place)

    def export(self, step: int) -> None:
        """Write model directories: of the policy with [ckpt.weights], of a valuer with it or a place of its own."""
        self.learner.check_finite()
        ckpt = self.cfg.ckpt
        assert ckpt is not None, "`has_exports` says so"
        if (weights := ckpt.weights) is not None:
            export_weights(
                self.run_dir,
                self.learner.network.weights,
                step,
                self.tokenizer_dir,
                self.cfg.model if weights.save_adapter_separately else None,
            )
            prune_exports(self.run_dir.weights, ckpt, step, self.learner.network.weights.mesh)
        if self.valuer is not None:
            self.valuer.export(self.cfg, step, self.tokenizer_dir)
        self.exported_step = step

    def report_saved(self) -> None:
        """Report checkpoints whose files are written; the orchestrator then completes them."""
        while self.written and (self.valuer is None or self.valuer.has_saved(self.written[0])):
            self.orchestrator.send(CheckpointSaved(step=self.written.popleft()))

    # -- the orchestrator --

    def handle_messages(self) -> None:
        """Handle the orchestrator's messages without waiting; report written checkpoints."""
        self.report_saved()
        self.orchestrator.poll()

    def release(self, loaded_version: int) -> None:
        """Free versions that no engine loads any more."""
        self.publisher.release(loaded_version - 1)

    def prune(self, complete_step: int) -> None:
        """Delete checkpoints beyond those that [ckpt] keeps, once another one is complete."""
        if (ckpt := self.cfg.ckpt) is not None:
            rundir.prune_checkpoints(self.run_dir, num_kept(ckpt), ckpt.keep_interval)

    def should_stop(self) -> bool:
        self.handle_messages()
        return self.orchestrator.stop is not None or self.interrupt.is_set

    # -- the end --

    def end_run(self) -> None:
        """Save unless Stop forbids it; return once no other process needs this one."""
        step = self.learner.step
        stop = self.orchestrator.stop if self.is_lead else None
        should_save = stop is None or stop.save
        if self.mesh.broadcast(should_save, bool):
            ckpt = self.cfg.ckpt
            if ckpt and (step != self.saved_step or (self.has_exports and step != self.exported_step)):
                self.memory.bring_back()
            self.save_if_due(is_last=True)
        if step != self.published_version:  # stopped between two versions that are due
            self.announce(self.publish())
        if self.is_lead:
            if self.cfg.ckpt is None and step:
                logger.warning("nothing was saved: ckpt = None")
            self.orchestrator.wait_complete(saved_step=self.saved_step, version=step)
        # All ranks wait here: closing a publisher frees the memory from which engines load a version.
        self.mesh.barrier()
        if self.valuer is not None:
            self.valuer.end()


def resume(cfg: TrainerConfig, learner: Learner) -> int | None:
    """Load the checkpoint that [resume] names; the step after which the run goes on, None if it begins.

    Raises: ConfigError when the checkpoint does not exist.
    """
    if cfg.resume is None:
        return None
    run, step = rundir.find_checkpoint(cfg.run_dir, cfg.resume.step, cfg.resume.dir)
    if run != cfg.run_dir and (existing := cfg.run_dir.complete_checkpoints()):
        raise ConfigError(
            f"resume.dir: {cfg.run_dir} has checkpoints already, up to step {existing[-1]}; continue it with --resume "
            "alone"
        )
    return checkpoint.resume(cfg, learner, run, step)


if __name__ == "__main__":  # torchrun src/stretto/trainer/rl.py @ train.toml
    sys.argv.insert(1, "trainer")
    runpy.run_module("stretto", run_name="__main__")
