"""Draws tasks into free slots, plays their groups, assesses them and hands them to the buffer.

Runs beside ship.py, which ships the groups that the buffer chooses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stretto.base.errors import ConfigError, EnvError
from stretto.config.sections.algorithm import EchoAlgo
from stretto.config.sections.distill import WITHOUT_BEHAVIOR
from stretto.config.sections.orchestrator import OrchestratorSection
from stretto.envs.base import Environment
from stretto.ledger.writer import GroupStart
from stretto.orchestrator.groups.buffer import Slot, SlotState
from stretto.orchestrator.groups.filters import assess_group
from stretto.orchestrator.rollout.continuation import Interruption
from stretto.orchestrator.rollout.play import Draw, build_echo
from stretto.orchestrator.rollout.player import Player, error_type_of
from stretto.orchestrator.run.parts import RunParts
from stretto.orchestrator.versions.read_check import ReadCheck
from stretto.records.partial import PartialRollout
from stretto.records.rollout import Group, Task

logger = logging.getLogger(__name__)


MAX_STARTS_AT_ONCE = 16
"""Rollouts started before other tasks run; starting one takes up to 1 ms (prompt and request)."""


class GroupPipeline:
    """Draws tasks and plays their groups until the buffer is closed."""

    def __init__(self, run: RunParts, reads: ReadCheck) -> None:
        self.parts, self._reads = run, reads
        self.cfg, self.buffer, self.ledger = run.cfg, run.buffer, run.ledger
        self.interruption = Interruption(run.ledger)
        self._failed_in_a_row: Counter[str] = Counter()  # groups, by environment
        self._played: list[tuple[Slot, Group]] = []  # they end in this iteration of the event loop
        self._next_start_at = 0.0  # of the next group, by the event loop's clock
        self._players = {name: self._build_player(name, env) for name, env in run.mix.envs.items()}
        self._group_sizes = {name: run.cfg.group_size_of(name) for name in run.mix.envs}
        self._frozen = {name for name in run.mix.envs if run.beside.player_of(name) is not None}
        self._annotated = {name for name in run.mix.envs if run.beside.annotates(name)}

    def _build_player(self, name: str, env: Environment) -> Player:
        """Build the player of an environment's training rollouts."""
        cfg, beside = self.cfg, self.parts.beside
        player = trained_player(self.parts.player, cfg, name)
        if (engine := beside.player_of(name)) is not None:
            player = replace(player, engine=engine)
        elif cfg.partial_rollout:
            player = replace(
                player,
                interruption=self.interruption,
                saves_single_turns=beside.annotates(name),
                masks_older_versions=cfg.mask_offpolicy_in_partial_rollout,
            )
        if isinstance(algo := cfg.algo_of(name), EchoAlgo):
            player = replace(player, echo=build_echo(algo, env, cfg.algo_path(name)))
        return player

    async def run(self, tasks: asyncio.TaskGroup, start: int) -> None:
        """Draw and play until the buffer is closed; `start` is the last trained step."""
        function = self.parts.rollout_function
        await (self._draw_groups(tasks) if function is None else function.play_groups(self, start))

    async def _draw_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Start a group for every slot that becomes free."""
        while await self.buffer.admit():
            if self.cfg.tasks_per_minute is not None:
                await self._wait_for_start(60 / self.cfg.tasks_per_minute)
                if not self.buffer.may_admit():
                    continue
            for slot in self._draw_slots():
                slot.job = tasks.create_task(self._play_group(slot, tasks), name=f"group {slot.group_id}")
            await asyncio.sleep(0)  # let them start and other tasks run before the next ones

    async def _wait_for_start(self, interval_s: float) -> None:
        """Keep to orchestrator.tasks_per_minute: groups start at even distances in time."""
        now = asyncio.get_running_loop().time()
        self._next_start_at = max(self._next_start_at, now)
        await asyncio.sleep(self._next_start_at - now)
        self._next_start_at += interval_s

    def _draw_slots(self) -> list[Slot]:
        """Draw groups into free slots, of which there is one, up to MAX_STARTS_AT_ONCE rollouts."""
        drawn: list[tuple[Slot, GroupStart]] = []
        num_left = MAX_STARTS_AT_ONCE if self.cfg.tasks_per_minute is None else 1  # 1: a single group
        while num_left > 0 and (not drawn or self.buffer.may_admit()):
            drawn.append(self._draw())
            num_left -= len(drawn[-1][1].members)
        self.ledger.groups_started([start for _, start in drawn])
        return [slot for slot, _ in drawn]

    def draw(self, *, is_extra: bool = False, task: Task | None = None, num_members: int | None = None) -> Slot:
        """Draw the next task, or give its number to `task`: put its group into a slot and write it to the ledger.

        num_members: rollouts of the group; None: as many as the environment's groups have.
        """
        slot, start = self._draw(is_extra, task, num_members)
        self.ledger.groups_started([start])
        return slot

    def _draw(
        self, is_extra: bool = False, task: Task | None = None, num_members: int | None = None
    ) -> tuple[Slot, GroupStart]:
        """Draw as `draw` does; the caller writes the start to the ledger before it does anything else."""
        group_id, drawn, is_new = self.parts.cursor.next(self.parts.mix)
        task = task or drawn
        members = range(num_members or self._group_sizes[task.env])
        partials = self._pop_partials(group_id, members) if self.parts.cursor.partials else {}
        is_frozen = task.env in self._frozen
        slot = self.buffer.start(group_id, task, is_frozen=is_frozen, partials=partials, is_extra=is_extra)
        return slot, GroupStart(group_id, task if is_new else None, members, slot.version)

    def _pop_partials(self, group_id: int, members: Sequence[int]) -> dict[int, PartialRollout]:
        """The partial rollouts of a draw by member, except those that are too old by now."""
        oldest = self.buffer.oldest_version
        partials = {}
        for member in members:
            partial = self.parts.cursor.partials.pop((group_id, member), None)
            if partial is None:
                continue
            if partial.first_version >= oldest:
                partials[member] = partial
                continue
            logger.info("rollout g%d.%d starts again: its saved tokens are too old now", group_id, member)
            self.ledger.forget_turns(group_id, member)
        return partials

    async def _play_group(self, slot: Slot, tasks: asyncio.TaskGroup) -> None:
        """Play one group, assess it and hand it to the buffer."""
        env = slot.task.env
        draw = Draw(slot.group_id, slot.task, self._group_sizes[env], slot.version, slot.partials)
        group = await self._players[env].play(self.parts.mix.envs[env], draw)
        if self.interruption.has_begun and not all(each.is_counted for each in group.rollouts):
            # Members that failed because of the stop are continued after a resume.
            await self.interruption.wait_for_cancellation()
        if self.parts.versions.wants_reading and env not in self._frozen:
            self._reads.offer(group, slot.version, tasks)
        if env in self._annotated:
            group = await self.parts.beside.annotate(group)
        await self._hand_over_together(slot, group)

    async def _hand_over_together(self, slot: Slot, group: Group) -> None:
        """Hand over this group and those that end in the same iteration of the event loop: one commit for all.

        The first of them does it for the others. What is dropped or cancelled meanwhile is not handed over.
        """
        self._played.append((slot, group))
        if len(self._played) > 1:
            return
        try:
            await asyncio.sleep(0)
        finally:
            played, self._played = self._played, []
            if running := [(slot, group) for slot, group in played if slot.state is SlotState.RUNNING]:
                self._hand_over(running)

    def hand_over(self, slot: Slot, group: Group) -> None:
        """Assess a played group, write it to the ledger and hand it to the buffer."""
        self._hand_over([(slot, group)])

    def _hand_over(self, played: Sequence[tuple[Slot, Group]]) -> None:
        """Assess groups, write them to the ledger in one commit, and only then hand them to the buffer."""
        parts = self.parts
        verdicts = [assess_group(group, self.cfg, parts.vocab_size, parts.hooks) for _, group in played]
        self.ledger.groups_finished([verdict.group for verdict in verdicts])
        for (slot, _), verdict in zip(played, verdicts):
            env = slot.task.env
            self.buffer.counts.ends.add(verdict.group)
            if parts.hooks is not None and not verdict.has_failed:
                parts.hooks.keep_finished(verdict.group)
            parts.watch.progress(f"group {slot.group_id} finished")
            if verdict.has_failed:
                self._on_failed_group(verdict.group)
                self.buffer.fail(slot)
                continue
            self._failed_in_a_row[env] = 0
            self.buffer.counts.flags.update(verdict.flags)
            self.buffer.complete(slot, verdict.group, has_signal=verdict.has_signal, rejected=verdict.rejected)
            if verdict.rejected is not None:
                self._on_rejected_group(env, verdict.rejected)

    def _on_rejected_group(self, env: str, rejected: str) -> None:
        """Raises: ConfigError if too many groups were rejected since the last batch."""
        limit = self.cfg.max_rejected_batches * self.buffer.bounds.groups_per_batch
        if self.buffer.num_rejected >= limit:
            raise ConfigError(
                f"{limit} groups were rejected without making a batch (max_rejected_batches = "
                f"{self.cfg.max_rejected_batches}), the last one, of {env}, by {rejected}: tasks are too easy or too "
                "hard for this policy, or its range is too wide."
            )

    def _on_failed_group(self, group: Group) -> None:
        """Raises: StrettoError of the cause's class, if too many groups in a row have failed."""
        env = group.task.env
        self._failed_in_a_row[env] += 1
        count = self._failed_in_a_row[env]
        cause = group.rollouts[-1].error or "unknown"
        named = (group.group_id, group.task.task_id, env)
        logger.warning("group %d, task %s of %s, failed (%d in a row): %s", *named, count, cause)
        if count >= self.cfg.max_failed_groups:
            kind = error_type_of(cause)
            remedy = ". Correct that code; the log has the first traceback" if issubclass(kind, EnvError) else ""
            raise kind(
                f"{count} groups in a row failed (max_failed_groups); the last one, "
                f"group {group.group_id}, task {group.task.task_id} of {env}: {cause}{remedy}"
            )


def trained_player(player: Player, cfg: OrchestratorSection, name: str) -> Player:
    """The player with an environment's sampling and timeout, for training rollouts."""
    section = cfg.env_of(name)
    assert section is not None, f"no environment {name}"
    timeout_s = section.rollout_timeout_s or player.timeout_s
    replay, own_retries = cfg.train.replay, section.max_rollout_retries
    return replace(
        player,
        sampling=cfg.sampling_of(name),
        timeout_s=timeout_s,
        max_retries=player.max_retries if own_retries is None else own_retries,
        is_learned=cfg.algo_of(name).type not in WITHOUT_BEHAVIOR,
        max_support=None if replay is None else replay.max_tokens,
        timeout_is=section.timeout_is,
    )
