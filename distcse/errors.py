"""The errors that distcse raises for a problem which the user can fix, each with a stable code.

The first class of a family is its base: `except RecipeError` catches all of DCSE-R… . Only the specific classes are raised.
A message states the problem and its place (key, value, file, line), the cause, and one fix. An error of any other type that
escapes is a defect of distcse. docs/reference/troubleshooting.md lists all codes; a code never changes its meaning and is never
reused.
"""

from __future__ import annotations

from typing import ClassVar


class DistcseError(Exception):
    """Base of every error that a user can cause and fix."""

    code: ClassVar[str] = "DCSE-D00"
    is_own_failure: ClassVar[bool] = False
    """Whether the computation of a group failed, and not its storage, cluster or run: other groups can continue without it."""

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


# R: recipes, search spaces and the commands' arguments. Commands exit with status 2.


class RecipeError(DistcseError):
    """Base of the errors in a recipe, a search space or a command's arguments."""

    code = "DCSE-R00"


class RecipeNotFoundError(RecipeError):
    """No packaged recipe and no readable file has the given name."""

    code = "DCSE-R01"


class RecipeSyntaxError(RecipeError):
    """The file is not valid YAML, is not a mapping of keys, or gives a key twice."""

    code = "DCSE-R02"


class UnknownKeyError(RecipeError):
    """The recipe or search space has a key that does not exist."""

    code = "DCSE-R03"


class InvalidValueError(RecipeError):
    """A value has the wrong type, is out of range, is missing, or contradicts another value."""

    code = "DCSE-R05"


class OverrideError(RecipeError):
    """An override is not of the form key.path=value, or its path does not exist."""

    code = "DCSE-R06"


class CustomClassError(RecipeError):
    """A class named by class_path cannot be imported or created, or lacks what distcse calls."""

    code = "DCSE-R07"


class FrozenKeyError(RecipeError):
    """An override changes a key that a resumed run cannot change."""

    code = "DCSE-R08"


class SearchSpaceError(RecipeError):
    """The search space varies a key that cannot be searched, or does not fit the recipe."""

    code = "DCSE-R09"


class CommandLineError(RecipeError):
    """A command's arguments are missing, malformed or contradictory."""

    code = "DCSE-R10"


class TemporaryPathError(RecipeError):
    """An output path lies in Ray's temporary copy of the job's working directory."""

    code = "DCSE-R11"


class LoggerSetupError(RecipeError):
    """A logger (TensorBoard, MLflow, W&B) lacks its package or its login."""

    code = "DCSE-R12"


class CommandDependencyError(RecipeError):
    """A command needs a Python package that is not installed."""

    code = "DCSE-R13"


class RecipeInheritanceError(RecipeError):
    """A recipe extends something that is no recipe's name, or recipes extend each other."""

    code = "DCSE-R14"


# C: the corpus, and the pairs of a mutual distillation.


class CorpusError(DistcseError):
    """Base of the errors in the training text."""

    code = "DCSE-C00"


class CorpusNotFoundError(CorpusError):
    """A corpus file, data set, split or package does not exist or cannot be opened."""

    code = "DCSE-C01"


class CorpusFormatError(CorpusError):
    """A corpus file is damaged, not UTF-8, or not of the format that its name says."""

    code = "DCSE-C02"


class MissingColumnError(CorpusError):
    """The corpus lacks the column that a key names, or the column cannot be used for it."""

    code = "DCSE-C03"


class EmptyCorpusError(CorpusError):
    """The corpus, or one of its files, contains no sentence."""

    code = "DCSE-C04"


class CorpusTooSmallError(CorpusError):
    """The corpus has fewer rows or pairs than the recipe needs."""

    code = "DCSE-C05"


class CorpusCacheError(CorpusError):
    """A prepared corpus in the cache is incomplete or damaged, or the cache cannot be written."""

    code = "DCSE-C06"


class TokenizationError(CorpusError):
    """The corpus cannot be tokenized: the tokenizer is slow, or a sentence has no token."""

    code = "DCSE-C07"


# M: models and their folders.


class EncoderError(DistcseError):
    """Base of the errors in a model: its folder, its settings, its export."""

    code = "DCSE-M00"


class ModelNotFoundError(EncoderError):
    """The name leads to no model, or to several: no such folder, hub model or finished run."""

    code = "DCSE-M01"


class ModelFormatError(EncoderError):
    """A file of the model is malformed, empty, or changed since it was saved."""

    code = "DCSE-M02"


class MissingWeightsError(EncoderError):
    """The model lacks weights, which would be random."""

    code = "DCSE-M03"


class PickledWeightsError(EncoderError):
    """The model has its weights as a pickle only, which distcse does not open."""

    code = "DCSE-M04"


class ModelLoadError(EncoderError):
    """transformers cannot load the model as what the recipe needs."""

    code = "DCSE-M05"


class UnsupportedModelError(EncoderError):
    """The model has an architecture, module or layout that distcse does not support here."""

    code = "DCSE-M06"


class TokenizerMissingError(EncoderError):
    """The model's folder has no tokenizer."""

    code = "DCSE-M07"


class TokenizerMismatchError(EncoderError):
    """The tokenizer does not load, is slow, has no vocabulary, or does not fit the model."""

    code = "DCSE-M08"


class EncoderSettingError(EncoderError):
    """A setting of a student, teacher or group does not fit its model, or is required by it."""

    code = "DCSE-M09"


class NotFiniteError(EncoderError):
    """A model's weight or score is NaN or infinite."""

    code = "DCSE-M10"
    is_own_failure = True


class ExportError(EncoderError):
    """The model cannot be exported to ONNX, or the exported file is not accurate enough."""

    code = "DCSE-M11"


class ExportDependencyError(EncoderError):
    """The export to ONNX needs a Python package that is not installed."""

    code = "DCSE-M12"


class HubUploadError(EncoderError):
    """The model hub refuses the upload or cannot be reached."""

    code = "DCSE-M13"


class DeviceMemoryError(EncoderError):
    """A single text does not fit in the device's memory, in a frozen model's forward pass."""

    code = "DCSE-M14"
    is_own_failure = True


class TextInputError(EncoderError):
    """What is passed to an encoder is not a text, or not only texts."""

    code = "DCSE-M15"


# T: teachers.


class TeacherError(DistcseError):
    """Base of the errors in teachers, their servers and their tables."""

    code = "DCSE-T00"


class EndpointError(TeacherError):
    """A teacher's HTTP endpoint cannot be reached, refuses, or answers something unexpected."""

    code = "DCSE-T01"


class TeacherServerError(TeacherError):
    """A teacher's actor failed, or crashed repeatedly."""

    code = "DCSE-T02"


class TeacherOutputError(TeacherError):
    """A teacher's vector or score is NaN, infinite or zero."""

    code = "DCSE-T03"


class EmbeddingTableError(TeacherError):
    """A cached table of a teacher, or a file computed from it, is incomplete or damaged."""

    code = "DCSE-T04"


class UnsuitableTeacherError(TeacherError):
    """A teacher cannot do what the recipe asks of it, such as giving vectors."""

    code = "DCSE-T05"


class ComparisonError(TeacherError):
    """The comparison of teachers has too few teachers or sentences, or weights have no labelled dev set to be fitted to."""

    code = "DCSE-T07"


class RefusedTextError(TeacherError):
    """A teacher's HTTP endpoint refuses one text, such as one with too many tokens; the message has its row and length."""

    code = "DCSE-T08"
    index: int | None = None
    """The text's index in the call."""
    place: str | None = None
    """The text's place for the user, such as `corpus row 70`."""

    def __str__(self) -> str:
        return super().__str__() if self.place is None else f"{self.place}: {super().__str__()}"


class ReusedTableError(EmbeddingTableError):
    """An earlier table, from which vectors are copied, was removed or damaged in the meantime."""

    code = "DCSE-T09"


# E: evaluation.


class EvaluationError(DistcseError):
    """Base of the errors in labelled sets and in what evaluation measures."""

    code = "DCSE-E00"


class EvaluationDataError(EvaluationError):
    """A labelled set, or the folder with the sets, does not exist."""

    code = "DCSE-E01"


class EvaluationFormatError(EvaluationError):
    """A labelled set is malformed, or lacks a column."""

    code = "DCSE-E02"


class InsufficientLabelsError(EvaluationError):
    """A labelled set has too few different labels or scores for its measure."""

    code = "DCSE-E03"


class EvaluationOptionError(EvaluationError):
    """An option, suite or model name of the evaluation does not exist or does not fit."""

    code = "DCSE-E04"


class EvaluationResultError(EvaluationError):
    """A stored evaluation is damaged, lacks the asked score, or cannot be written."""

    code = "DCSE-E05"


class ModelOutputError(EvaluationError):
    """The evaluated model outputs NaN or infinity."""

    code = "DCSE-E06"


class EvaluationDependencyError(EvaluationError):
    """The evaluation needs a Python package that is not installed."""

    code = "DCSE-E07"


# X: runs and clusters.


class RunError(DistcseError):
    """Base of the errors that keep a run from starting, resuming or finishing."""

    code = "DCSE-X00"


class RunDirectoryError(RunError):
    """The folder is not a run or sweep, has no finished model, or cannot be written."""

    code = "DCSE-X01"


class RunRecordError(RunError):
    """A file that the run wrote is missing, damaged or edited."""

    code = "DCSE-X02"


class RunInUseError(RunError):
    """Another process works in the run's directory."""

    code = "DCSE-X03"


class RunTakenOverError(RunError):
    """A later start has taken over the run's directory, or its lease cannot be read."""

    code = "DCSE-X04"


class ResumeMismatchError(RunError):
    """The data or models differ from those that the run began with."""

    code = "DCSE-X05"


class CheckpointError(RunError):
    """A checkpoint is missing or damaged."""

    code = "DCSE-X06"


class MissingDependencyError(RunError):
    """A run, sweep or mining needs an optional package that is not installed."""

    code = "DCSE-X07"


class RayConnectionError(RunError):
    """The Ray cluster cannot be joined or started."""

    code = "DCSE-X08"


class ClusterTooSmallError(RunError):
    """The cluster has no room, or not enough memory, for what must run at the same time."""

    code = "DCSE-X09"


class NodeLabelError(RunError):
    """No node of the cluster has the labels that a key asks for."""

    code = "DCSE-X10"


class SharedStorageError(RunError):
    """A node does not see a folder that all nodes must share."""

    code = "DCSE-X11"


class WorkersLostError(RunError):
    """Training workers crashed or their nodes were lost more often than max_failures allows."""

    code = "DCSE-X12"
    is_own_failure = True


class ProcessLostError(RunError):
    """The run lost a process other than its workers, such as the driver, and cannot replace it."""

    code = "DCSE-X13"


class WorkFailedError(RunError):
    """A group, a trial or a helper process failed with an unexpected error."""

    code = "DCSE-X14"


class CUDAGraphError(RunError):
    """`cuda_graphs` is `on`, and the model's training step cannot be recorded as a CUDA graph."""

    code = "DCSE-X15"


class DivergedError(RunError):
    """A loss, score or weight is not finite; the same values would diverge again."""

    code = "DCSE-X16"
    is_own_failure = True


class StoppedEarlyError(RunError):
    """The command was asked to stop outside of training, so that there is no new checkpoint; it exits with 130."""

    code = "DCSE-X17"
    run: str | None = None
    """The folder or address of the run or sweep that can be resumed; None outside of one."""

    def __str__(self) -> str:
        return super().__str__() + ("" if self.run is None else f"; continue with --resume {self.run}")


class RunArgumentError(RunError):
    """The Python API was called with an argument of another type, or with arguments that do not fit together."""

    code = "DCSE-X18"


class GpuRequiredError(RunError):
    """`resources.gpu` is `required`, and a process that computes with a model would get no GPU."""

    code = "DCSE-X19"


class OutOfMemoryError(RunError):
    """A training step needs more memory than the device has; the same values would need it again."""

    code = "DCSE-X20"
    is_own_failure = True


# S: storage. What was being written is discarded; what was there before is intact.


class StorageError(RunError):
    """Base of the errors of storage that is full, read-only or failing."""

    code = "DCSE-S00"


class StorageWriteError(StorageError):
    """A file or folder cannot be written: the disk is full, read-only or failing."""

    code = "DCSE-S01"


class ObjectStorageError(StorageError):
    """A request to object storage failed."""

    code = "DCSE-S02"


class StorageAddressError(StorageError):
    """The address is not one of object storage, or contains credentials."""

    code = "DCSE-S03"
