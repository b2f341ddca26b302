"""Real faces in the folders of "Labeled Faces in the Wild" (LFW), for machines without a network.

python examples/course/sample_faces.py data/lfw

scikit-image ships 100 of LFW's faces, 25 by 25 points, grey and without names. Each face
becomes
a folder of four jpg files of 250 by 250 points, the size of LFW's own files: the face, its mirror
image, and two narrower cuts. A 101st folder holds cuts of a sharp photograph in colour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.running import make_once
from PIL import Image, ImageOps

__all__ = ["find_or_make", "make_faces"]

SIDE = 250  # points, of LFW's files
_FACES = 100  # pictures of lfw_subset that are faces; the rest are not
_CUTS = (0.06, 0.12)  # parts of a picture that are cut off at each edge
_PORTRAIT = ("Eileen_Collins", "astronaut.png", (140, 15, 310, 185))


def find_or_make(folder: Path) -> tuple[Path, bool]:
    """Return ``folder`` and whether its pictures were made now. An existing LFW is not changed.

    Raises:
        FileNotFoundError: The folder exists, but does not contain a jpg file.
        ModuleNotFoundError: Scikit-image is not installed.
        OSError: The folder cannot be written.
    """
    if make_once(folder, lambda beside: make_faces(beside / folder.name)):
        return folder, True
    if not any(folder.rglob("*.jpg")):
        raise FileNotFoundError(f"no jpg files in {folder}")
    return folder, False


def make_faces(folder: Path) -> None:
    """Write 101 folders of four jpg files each below ``folder``."""
    for name, picture in _people():
        (folder / name).mkdir(parents=True)
        for number, version in enumerate(_versions(picture), 1):
            version.save(folder / name / f"{name}_{number:04d}.jpg", quality=92)


def _people() -> Iterable[tuple[str, Image.Image]]:
    import skimage

    data = Path(skimage.__file__).parent / "data"
    for number, face in enumerate(np.load(data / "lfw_subset.npy")[:_FACES]):
        yield f"Person_{number:03d}", Image.fromarray((face * 255).astype(np.uint8))
    name, file, box = _PORTRAIT
    yield name, Image.open(data / file).crop(box)


def _versions(picture: Image.Image) -> Iterable[Image.Image]:
    """Yield four pictures of ``SIDE`` by ``SIDE``: whole, mirrored, and two narrower ones."""
    picture = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    yield picture
    yield ImageOps.mirror(picture)
    for cut in _CUTS:
        left = round(cut * SIDE)
        box = (left, left, SIDE - left, SIDE - left)
        yield picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)


def main(argv: list[str] | None = None) -> None:
    """Write the faces."""
    from common.arguments import Parser

    parser = Parser(description=__doc__.splitlines()[0], epilog=__doc__.splitlines()[2])
    parser.add_argument("folder", type=Path, help="what lfw_dataset.py calls -path_to_folder")
    args = parser.parse_args(argv)
    try:
        _, made = find_or_make(args.folder)
    except OSError as error:
        reason = error.strerror or error
        parser.error(f"{args.folder}: {reason}")
    count = sum(1 for _ in args.folder.rglob("*.jpg"))
    print(f"{count} pictures {'are now' if made else 'were already'} in {args.folder}")


if __name__ == "__main__":
    main()
