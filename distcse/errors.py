"""The errors that distcse raises for a problem which the user can fix, each with a stable code.

The first class of a family is its base: `except RecipeError` catches all of DCSE-R… . Only the specific classes are raised.
A message states the problem and its place (key, value, file, line), the cause, and one fix. An error of any other type that
escapes is a defect of distcse. docs/reference/troubleshooting.md lists all codes; a code never changes its meaning and is never
reused. `nearest` suggests, at the end of a message, the name that was probably meant.
"""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable
from typing import ClassVar


class DistcseError(Exception):
    """Base of every error that a user can cause and fix."""

    code: ClassVar[str] = "DCSE-D00"
    is_own_failure: ClassVar[bool] = False
    """Whether the computation of a group failed, and not its storage, cluster or run: other groups can continue without it."""

    def __init_subclass__(cls, code: str | None = None, is_own_failure: bool = False) -> None:
        if code is not None:  # None: the class that Ray makes of an actor's error, below that error and RayTaskError
            cls.code, cls.is_own_failure = code, is_own_failure

    @property
    def coded_message(self) -> str:
        """The message, after the code in brackets."""
        return f"[{self.code}] {self}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


_NOT_READ = (sysconfig.get_path("stdlib"), "<frozen ")
"""Beginnings of the names of files that nobody corrects."""


def failing_line(error: BaseException, caller: str) -> str | None:
    """Return `FILE, line N` of the code that raised an error below the file `caller`; None if the call itself failed.

    It is the innermost line of the user's code, or else of a package; Python's and PyTorch's own lines are left out.
    """
    files = traceback.extract_tb(error.__traceback__)
    installed = f"{os.sep}site-packages{os.sep}"
    below = [
        frame
        for frame in files
        if frame.filename != caller
        and f"{installed}torch{os.sep}" not in frame.filename
        and (installed in frame.filename or not frame.filename.startswith(_NOT_READ))
    ]
    package = os.path.dirname(__file__)
    own = [frame for frame in below if installed not in frame.filename and not frame.filename.startswith(package)]
    return next((f"{frame.filename}, line {frame.lineno}" for frame in reversed(own or below)), None)


def described(error: BaseException, caller: str | None = None) -> str:
    """Return an error's type and text on one line, and its `failing_line` below a file, if one is given."""
    line = None if caller is None else failing_line(error, caller)
    return f"{type(error).__name__}: {' '.join(str(error).split())}{f'; correct {line}' if line else ''}"


class RecipeError(DistcseError, code="DCSE-R00"):
    """Base of the errors in recipes, search spaces and arguments; a command exits with status 2."""


class RecipeNotFoundError(RecipeError, code="DCSE-R01"):
    """No packaged recipe or readable file has this name."""


class RecipeSyntaxError(RecipeError, code="DCSE-R02"):
    """The file is no valid YAML mapping, gives a key twice, or extends itself or nothing."""


class UnknownKeyError(RecipeError, code="DCSE-R03"):
    """The recipe or search space has an unknown key."""


class InvalidValueError(RecipeError, code="DCSE-R05"):
    """A value has a wrong type or form, is out of range or missing, or contradicts another."""


class CustomClassError(RecipeError, code="DCSE-R07"):
    """The class of a loss or teacher cannot be imported, created or called, or lacks a method."""


class FrozenKeyError(RecipeError, code="DCSE-R08"):
    """An override changes a key that a resumed run cannot change."""


class SearchSpaceError(RecipeError, code="DCSE-R09"):
    """A key of the search space cannot be searched, or does not fit the recipe."""


class ArgumentError(RecipeError, code="DCSE-R10"):
    """An argument is missing or invalid, or contradicts another."""


class LoggerSetupError(RecipeError, code="DCSE-R12"):
    """A logger (TensorBoard, MLflow, W&B) lacks its package or its login."""


class CorpusError(DistcseError, code="DCSE-C00"):
    """Base of the errors in the training text."""


class CorpusNotFoundError(CorpusError, code="DCSE-C01"):
    """A corpus file, data set, split or package does not exist or cannot be opened."""


class CorpusFormatError(CorpusError, code="DCSE-C02"):
    """A corpus file is damaged, not UTF-8, or not of its name's format."""


class MissingColumnError(CorpusError, code="DCSE-C03"):
    """The corpus lacks the column that a key names, or cannot use it."""


class CorpusTooSmallError(CorpusError, code="DCSE-C05"):
    """The corpus has fewer rows or pairs than the recipe needs."""


class CorpusCacheError(CorpusError, code="DCSE-C06"):
    """A prepared corpus in the cache is incomplete or damaged, or the cache cannot be written."""


class EncoderError(DistcseError, code="DCSE-M00"):
    """Base of the errors in a model: its folder, its settings, its export."""


class ModelNotFoundError(EncoderError, code="DCSE-M01"):
    """No folder, hub model or finished run has this name, or several have."""


class ModelFormatError(EncoderError, code="DCSE-M02"):
    """The model lacks weights, has a malformed or changed file, or transformers cannot load it."""


class PickledWeightsError(EncoderError, code="DCSE-M04"):
    """The weights exist only as a pickle, which distcse does not open."""


class UnsupportedModelError(EncoderError, code="DCSE-M06"):
    """distcse does not support the model's architecture, module or layout here."""


class TokenizerError(EncoderError, code="DCSE-M08"):
    """The tokenizer is missing, slow or without a vocabulary, does not fit the model, or gives no token for a sentence."""


class EncoderSettingError(EncoderError, code="DCSE-M09"):
    """A setting of a student, teacher or group does not fit its model, or is missing."""


class NotFiniteError(EncoderError, code="DCSE-M10", is_own_failure=True):
    """A model's weight or score is NaN or infinite."""


class ExportError(EncoderError, code="DCSE-M11"):
    """The model cannot be exported to ONNX, or the exported file is not accurate enough."""


class HubUploadError(EncoderError, code="DCSE-M13"):
    """The model hub refuses the upload or cannot be reached."""


class DeviceMemoryError(EncoderError, code="DCSE-M14", is_own_failure=True):
    """A single text does not fit in the device's memory in a frozen forward pass."""


class TeacherError(DistcseError, code="DCSE-T00"):
    """Base of the errors in teachers, their servers and their tables."""


class EndpointError(TeacherError, code="DCSE-T01"):
    """A teacher's HTTP endpoint cannot be reached, refuses, or answers something unexpected."""


class TeacherServerError(TeacherError, code="DCSE-T02"):
    """A teacher's actor failed, or crashed repeatedly."""


class TeacherOutputError(TeacherError, code="DCSE-T03"):
    """A teacher's vector or score is NaN, infinite or zero."""


class EmbeddingTableError(TeacherError, code="DCSE-T04"):
    """A cached table of a teacher, or a file computed from it, is incomplete or damaged."""


class UnsuitableTeacherError(TeacherError, code="DCSE-T05"):
    """The teacher does not fit the recipe: it has no vectors, for example."""


class ComparisonError(TeacherError, code="DCSE-T07"):
    """The comparison has too few teachers or sentences, or no labeled dev set to fit weights to."""


class RefusedTextError(TeacherError, code="DCSE-T08"):
    """A teacher's HTTP endpoint refuses one text, such as one with too many tokens."""

    index: int | None = None
    """The text's index in the call."""
    place: str | None = None
    """The text's place for the user, such as `corpus row 70`."""

    def __str__(self) -> str:
        return super().__str__() if self.place is None else f"{self.place}: {super().__str__()}"


class ReusedTableError(EmbeddingTableError, code="DCSE-T09"):
    """An earlier table with vectors to copy was removed or damaged."""


class EvaluationError(DistcseError, code="DCSE-E00"):
    """Base of the errors in labeled sets and in what evaluation measures."""


class EvaluationDataError(EvaluationError, code="DCSE-E01"):
    """A labeled set, or the folder with the sets, does not exist."""


class EvaluationFormatError(EvaluationError, code="DCSE-E02"):
    """A labeled set is malformed, lacks a column, or has too few different labels or scores."""


class EvaluationOptionError(EvaluationError, code="DCSE-E04"):
    """An option, suite or model name of the evaluation does not exist or does not fit."""


class EvaluationResultError(EvaluationError, code="DCSE-E05"):
    """A stored evaluation is damaged, lacks the asked score, or cannot be written."""


class ModelOutputError(EvaluationError, code="DCSE-E06"):
    """The evaluated model outputs NaN or infinity."""


class DownloadError(EvaluationError, code="DCSE-E07"):
    """A labeled set's file cannot be downloaded, or differs from the published one."""


class RunError(DistcseError, code="DCSE-X00"):
    """Base of the errors that keep a run from starting, resuming or finishing."""


class RunDirectoryError(RunError, code="DCSE-X01"):
    """The folder is not a run or sweep, has no finished model, or cannot be written."""


class RunRecordError(RunError, code="DCSE-X02"):
    """A file that the run wrote is missing, damaged or edited."""


class RunInUseError(RunError, code="DCSE-X03"):
    """Another process works in the run's directory."""


class RunTakenOverError(RunError, code="DCSE-X04"):
    """A later start has taken over the run's directory, or its lease cannot be read."""


class ResumeMismatchError(RunError, code="DCSE-X05"):
    """The data or models differ from those that the run began with."""


class CheckpointError(RunError, code="DCSE-X06"):
    """A checkpoint is missing or damaged."""


class MissingDependencyError(RunError, code="DCSE-X07"):
    """An optional package is not installed."""


class RayConnectionError(RunError, code="DCSE-X08"):
    """The Ray cluster cannot be joined or started, or takes no job."""


class ClusterTooSmallError(RunError, code="DCSE-X09"):
    """The cluster lacks nodes, labels, GPUs, CPUs or memory."""


class SharedStorageError(RunError, code="DCSE-X11"):
    """A node does not see a folder that all nodes must share, or has other versions or another time."""


class WorkersLostError(RunError, code="DCSE-X12", is_own_failure=True):
    """Training workers crashed or their nodes were lost more often than max_failures allows."""


class ProcessLostError(RunError, code="DCSE-X13"):
    """The run lost a process that it cannot replace, such as the driver."""


class WorkFailedError(RunError, code="DCSE-X14"):
    """A group, a trial or a helper process failed with an unexpected error."""


class CUDAGraphError(RunError, code="DCSE-X15"):
    """`cuda_graphs` is `on`, but the training step cannot be recorded."""


class DivergedError(RunError, code="DCSE-X16", is_own_failure=True):
    """A loss, score or weight is not finite."""


class StoppedEarlyError(RunError, code="DCSE-X17"):
    """The command was stopped outside of training, without a new checkpoint; it exits with 130."""

    run: str | None = None
    """The folder or address of the run or sweep that can be resumed; None outside of one."""

    def __str__(self) -> str:
        return super().__str__() + ("" if self.run is None else f"; continue with --resume {self.run}")


class OutOfMemoryError(RunError, code="DCSE-X20", is_own_failure=True):
    """A training step needs more memory than the device has."""


class StorageError(RunError, code="DCSE-S00"):
    """Base of the errors of storage that is full, read-only or failing."""


class StorageWriteError(StorageError, code="DCSE-S01"):
    """A file or folder cannot be written: the disk is full, read-only or failing."""


class ObjectStorageError(StorageError, code="DCSE-S02"):
    """A request to object storage failed."""


class StorageAddressError(StorageError, code="DCSE-S03"):
    """The address is not one of object storage, or contains credentials."""


PATHS_BY_NAME = {
    "batch": "training.batch_size",
    "batch_size": "training.batch_size",
    "corpus": "corpus.path",
    "dataset": "corpus.dataset",
    "encoders": "teachers.encoders.0.backbone",
    "epochs": "training.epochs",
    "gpus": "training.workers",
    "layers": "student.layers",
    "learning_rate": "training.lr",
    "lr": "training.lr",
    "max_seq_length": "student.max_length",
    "max_steps": "training.max_steps",
    "model": "student.backbone",
    "num_train_epochs": "training.epochs",
    "num_workers": "training.workers",
    "output_dir": "storage.runs",
    "seed": "seed",
    "student": "student.backbone",
    "teacher": "teachers.encoders.0.backbone",
    "teachers": "teachers.encoders.0.backbone",
    "trials": "sweep.search.trials",
    "workers": "training.workers",
}
"""Paths of a student's recipe, and of the search space's keys behind `sweep.`, by what newcomers write."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `; did you mean 'x'?` for the closest known name, or an empty string.

    Args:
        name: The name that does not exist.
        known: Those that exist.
        cutoff: Least similarity, from 0 to 1.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
