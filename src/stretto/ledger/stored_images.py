"""Pixels of images in the ledger, once per segment file; rollouts there name them by hash.

A segment holds all that its rollouts need, so that it can be deleted with its images. The row of an image is committed
with the first group that shows it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from stretto.base.errors import DataError, WireError
from stretto.base.paths import RunDir
from stretto.ledger.token_file import Place, load_image
from stretto.records.images import Image, image_hash
from stretto.records.rollout import Branch, Rollout

TABLE = """
CREATE TABLE IF NOT EXISTS images (
    hash TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (hash, segment)
) WITHOUT ROWID;
"""
# Not part of the schema: created when a ledger without it is opened for writing.
INSERT = "INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?)"


def images_of(rollouts: Iterable[Rollout]) -> list[Image]:
    """The images of these rollouts, each once."""
    return list(dict.fromkeys(image for rollout in rollouts for branch in rollout.branches for image in branch.images))


def hashes_in(db: sqlite3.Connection, segment: int) -> set[str]:
    """Hashes of the images in a segment."""
    return {name for (name,) in db.execute("SELECT hash FROM images WHERE segment = ?", (segment,))}


def with_patches(
    db: sqlite3.Connection, run_dir: RunDir, segment: int, branches: Sequence[Branch], known: dict[str, Image]
) -> tuple[Branch, ...]:
    """Branches that were loaded from a segment, with the pixels of their images.

    known: images that are loaded already, by hash; others are added, so that equal ones share their pixels.

    Raises: DataError if one is missing or damaged.
    """
    names = {image.hash for branch in branches for image in branch.images}
    for name in names - known.keys():
        known[name] = load(db, run_dir, segment, name)
    return tuple(
        msgspec.structs.replace(branch, images=tuple(known[image.hash] for image in branch.images))
        if branch.images
        else branch
        for branch in branches
    )


def find_image(db: sqlite3.Connection, run_dir: RunDir, name: str) -> Image:
    """The image of this hash, with its pixels.

    Raises: DataError if no segment that is kept has it, or it is damaged.
    """
    row = None
    if _has_table(db):
        query = "SELECT segment FROM images LEFT JOIN segments USING (segment) WHERE hash = ? AND deleted_at IS NULL"
        row = db.execute(query, (name,)).fetchone()
    if row is None:
        raise DataError(f"{run_dir.ledger}: there is no image {name}; its rollouts may be deleted.")
    return load(db, run_dir, row[0], name)


def damaged_images(db: sqlite3.Connection, run_dir: RunDir) -> Iterator[str]:
    """Why stored images cannot be loaded, one sentence per image."""
    if not _has_table(db):
        return
    query = "SELECT hash, segment FROM images LEFT JOIN segments USING (segment) WHERE deleted_at IS NULL"
    for name, segment in db.execute(query).fetchall():
        try:
            load(db, run_dir, segment, name)
        except (DataError, WireError) as error:
            yield str(error)


def forget_damaged(db: sqlite3.Connection, run_dir: RunDir, segment: int) -> None:
    """Forget images that a power cut took from a segment, so that the next group that shows one writes it again."""
    for name in hashes_in(db, segment):
        try:
            load(db, run_dir, segment, name)
        except (DataError, WireError):
            db.execute("DELETE FROM images WHERE hash = ? AND segment = ?", (name, segment))


def _has_table(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'images'").fetchone() is not None


def load(db: sqlite3.Connection, run_dir: RunDir, segment: int, name: str) -> Image:
    """The image of this hash in a segment, with its pixels.

    Raises: DataError if it is missing or damaged.
    """
    query = "SELECT offset, length, crc FROM images WHERE hash = ? AND segment = ?"
    row = db.execute(query, (name, segment)).fetchone()
    if row is None:
        raise DataError(f"{run_dir.segment(segment)}: it has no image {name}, which a rollout there shows.")
    image = load_image(run_dir, Place(segment, *row), name)
    if image.patches is None or image_hash(image.patches, image.grid) != name:
        raise DataError(f"{run_dir.segment(segment)} at {row[0]}: the image there is not {name}.")
    return image
