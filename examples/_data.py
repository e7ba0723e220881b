"""The data of the examples: scanned digits, or CIFAR-10 from its Python batches."""

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn.datasets

CIFAR10_FOLDER = "cifar-10-batches-py"
CIFAR10_TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
CIFAR10_TEST = "test_batch"
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"


class Dataset(NamedTuple):
    """Images as they were read, and how to augment and normalise them."""

    train_images: np.ndarray  # uint8[N, height, width, channels]
    train_labels: np.ndarray  # int32[N]
    test_images: np.ndarray
    test_labels: np.ndarray
    mean: np.ndarray  # float32[channels], of the pixels
    std: np.ndarray
    pad: int  # pixels by which a training image may move
    flip: bool  # whether it may be mirrored

    def normalize(self, images: np.ndarray) -> np.ndarray:
        return (images.astype(np.float32) - self.mean) / self.std

    def train_batch(
        self, seed: int, step: int, batch_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the batch of one step, a function of seed and step alone.

        So a resumed run reads what it would have read, with no iterator to restore.
        """
        epoch, i = divmod(step, len(self.train_images) // batch_size)
        order = np.random.default_rng((seed, epoch)).permutation(len(self.train_images))
        chosen = order[i * batch_size : (i + 1) * batch_size]
        rng = np.random.default_rng((seed, epoch, i))
        images = augment(self.train_images[chosen], rng, self.pad, self.flip)
        return self.normalize(images), self.train_labels[chosen]

    def test_batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for i in range(0, len(self.test_images), size):
            images, labels = self.test_images[i : i + size], self.test_labels[i:][:size]
            yield self.normalize(images), labels


def augment(
    images: np.ndarray, rng: np.random.Generator, pad: int, flip: bool
) -> np.ndarray:
    """Pads with zeros, crops at random to the old size, and mirrors every second."""
    n, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    top, left = rng.integers(0, 2 * pad + 1, (2, n, 1))
    rows, columns = top + np.arange(height), left + np.arange(width)
    if flip:
        columns = np.where(rng.random((n, 1)) < 0.5, columns[:, ::-1], columns)
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def load_digits() -> Dataset:
    """Loads scikit-learn's 1,797 scanned digits of 8 x 8 pixels; 1,500 to train on."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.uint8)  # 0 to 16
    labels = labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1500], order[1500:]
    return Dataset(
        images[train],
        labels[train],
        images[test],
        labels[test],
        mean=np.array([images[train].mean()], np.float32),
        std=np.array([images[train].std()], np.float32),
        pad=1,
        flip=False,
    )


def load_cifar10(data_dir: Path) -> Dataset:
    """Loads CIFAR-10, 32 x 32 pixels in colour, from the files of its Python version.

    Raises:
        FileNotFoundError: If one of the six files is not there.
        ValueError: If one of them is not what it should be.
    """
    folder = data_dir / CIFAR10_FOLDER
    parts = [_load_cifar10_batch(folder / name) for name in CIFAR10_TRAIN]
    test_images, test_labels = _load_cifar10_batch(folder / CIFAR10_TEST)
    return Dataset(
        np.concatenate([images for images, _ in parts]),
        np.concatenate([labels for _, labels in parts]),
        test_images,
        test_labels,
        mean=np.array(
            [125.3, 123.0, 113.9], np.float32
        ),  # of the 50,000 training images
        std=np.array([63.0, 62.1, 66.7], np.float32),
        pad=4,
        flip=True,
    )


def _load_cifar10_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads one pickled dict of uint8 rows, a plane each of red, green and blue."""
    advice = f"Unpack {CIFAR10_URL} into D and pass `--data-dir D`."
    if not path.is_file():
        looked = path.parent if path.parent.is_dir() else path.parent.parent
        if path.is_dir():
            found = "it is a folder"
        elif looked.is_dir():
            found = ", ".join(sorted(p.name for p in looked.iterdir())) or "nothing"
            found = f"`{looked}` holds {found}"
        else:
            found = f"there is no folder `{looked}`"
        raise FileNotFoundError(
            f"CIFAR-10 needs the file `{path}`, but {found}. {advice}"
        )
    try:
        with path.open("rb") as file:
            return _images_and_labels(_DataUnpickler(file, encoding="bytes").load())
    except Exception as error:  # a damaged pickle may raise any
        reason = str(error)
        if not isinstance(error, _NotABatchError):
            reason = f"{type(error).__name__}: {reason}"
        reason = "".join(c if c.isprintable() else "?" for c in reason[:300])
        raise ValueError(
            f"`{path}` ({path.stat().st_size:,} bytes) is not a whole CIFAR-10 batch: "
            f"{reason}. The file may have been cut short, or be another one. {advice}"
        ) from error


class _NotABatchError(ValueError):
    """What a file holds in place of a batch, in words."""


def _images_and_labels(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(batch, dict):
        raise _NotABatchError(f"expected a dict, but found a {type(batch).__name__}")
    # Python 2 wrote its keys as bytes; whoever saved it again may have strings.
    batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
    missing = {"data", "labels"} - batch.keys()
    if missing:
        raise _NotABatchError(
            f"expected `data` and `labels`, but found {', '.join(map(str, batch))}"
        )
    labels, data = (
        x.array if isinstance(x, _Array) else x
        for x in (batch["labels"], batch["data"])
    )
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size:
        raise _NotABatchError(
            "expected a list of integers as `labels`, but found "
            f"{labels.dtype}{[*labels.shape]}"
        )
    if labels.min() < 0 or labels.max() > 9:
        raise _NotABatchError(
            f"expected labels from 0 to 9, but found {labels.min()} to {labels.max()}"
        )
    if not isinstance(data, np.ndarray):
        found = f"a {type(data).__name__}"
    else:
        found = f"{data.dtype}{[*data.shape]}"
    if found != f"uint8[{len(labels)}, 3072]":
        raise _NotABatchError(
            f"expected uint8[{len(labels)}, 3072] for its {len(labels)} labels, but "
            f"found {found}"
        )
    images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, labels.astype(np.int32)


# A pickle is a program, and NumPy trusts it as well: a made-up dtype can point into
# memory. So nothing of NumPy's own is called, and all that a file brings are numbers.


class _DataUnpickler(pickle.Unpickler):
    """Reads arrays of numbers in lists and dicts, and runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core.", "numpy.core.")  # from NumPy 2 on
        if f"{module}.{name}" not in _STAND_INS:
            raise _NotABatchError(f"expected numbers, but found `{module}.{name}`")
        return _STAND_INS[f"{module}.{name}"]


class _Dtype:
    def __init__(self, name: Any, *_: Any):
        name = name.decode() if isinstance(name, bytes) else name
        if not re.fullmatch("[iuf][1248]", name):
            raise _NotABatchError(f"expected numbers, but found the dtype `{name}`")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        order = order.decode() if isinstance(order, bytes) else order
        if order not in ("<", ">", "|", "="):
            raise _NotABatchError(f"expected numbers, but found the byte order {order}")
        self.dtype = np.dtype(f"{order}{self.dtype.str[1:]}")


class _Array:
    def __init__(self, *_: Any):
        self.array = np.zeros(0)  # until its state is set

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        array = np.frombuffer(data, dtype.dtype)
        self.array = array.reshape(shape, order="F" if is_fortran else "C")


def _array_of_buffer(buffer: Any, dtype: Any, shape: Any, order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", buffer))
    return array


def _bytes_of(text: str, _: str) -> bytes:
    return text.encode("latin1")  # how Python 3 writes bytes for Python 2


_STAND_INS = {
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy.core.multiarray.scalar": lambda dtype, data: np.frombuffer(
        data, dtype.dtype
    )[0],
    "numpy.core.numeric._frombuffer": _array_of_buffer,
    "_codecs.encode": _bytes_of,
}
