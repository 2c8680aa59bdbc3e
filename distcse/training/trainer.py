"""The training loop, which Ray Train workers, actors of mutual distillation, local runs and Tune trials share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from distcse.devices.device import is_gpu
from distcse.devices.distributed import on_all_ranks, rank, world_size
from distcse.errors import ResumeMismatchError, RunError
from distcse.events import LogMessage, Reporter
from distcse.recipe import LoopSection
from distcse.training.checkpoint_files import TrainerState, load_trainer_state
from distcse.training.checkpoint_manager import CheckpointManager, ReportToTrain
from distcse.training.checkpoints import CheckpointStore
from distcse.training.compiled_step import CompileMode, compiles_layers, open_compiled_step
from distcse.training.cuda_graphs import GraphMode, open_step, records_steps
from distcse.training.engines import describe_engine, make_engine
from distcse.training.out_of_memory import OutOfMemoryAdvice
from distcse.training.schedule import warmup_then_linear
from distcse.training.step_check import open_checked_step
from distcse.training.step_log import StepLog, StopCheck
from distcse.training.task import Engine, StepInputs, TrainingTask


@dataclass(frozen=True)
class TrainResult:
    """Result of a call of `train`."""

    state: TrainerState
    """Step and dev scores at the end."""
    steps: int
    """Number of steps of the run, including those of earlier calls."""
    seconds: float
    """Wall time of this call's steps, without dev scores and checkpoints."""
    teacher_wait_s: float
    """Part of `seconds` spent waiting for teachers."""
    interrupted: bool = False
    """Whether a stop request ended the run before its last step, or before the last dev score."""


def train(
    task: TrainingTask,
    section: LoopSection,
    checkpoints: CheckpointStore,
    reporter: Reporter,
    report_to_train: ReportToTrain | None = None,
    cuda_graphs: GraphMode = "off",
    compile_layers: CompileMode = "off",
    key: str = "training",
) -> TrainResult:
    """Train a task from its latest checkpoint, if there is one, to its end. Every worker calls it.

    Args:
        task: The model, its batches and its loss.
        section: Optimizer, schedule, precision and engine.
        checkpoints: Stores checkpoints.
        reporter: Receives events from rank 0; its stop request ends the run (see `StopCheck`), after a step with a checkpoint.
        report_to_train: Called by every worker after every dev score. Default: none.
        cuda_graphs: Whether to record the step as a CUDA graph on a GPU; see `open_step`. Default: off.
        compile_layers: Whether to compile the trained layers; see `open_compiled_step`. Default: off.
        key: Recipe key of `section`, for messages. Default: training.

    Raises:
        DivergedError: A loss, a dev score or a weight is not finite. The previous checkpoint remains the latest.
        StorageWriteError: A checkpoint cannot be written. The previous one remains the latest.
        CheckpointError: There are checkpoints, but all are damaged.
        ResumeMismatchError: The checkpoint has other weights than the model.
        CUDAGraphError: `cuda_graphs` is on, and the step cannot be recorded.
        OutOfMemoryError: A step needs more memory than the device has.
        RunTakenOverError: A later start of the run has taken over its directory.
    """
    reporter = reporter if rank() == 0 else Reporter()
    # Restore on all ranks together: a late rank would otherwise see rank 0's new step-0 checkpoint.
    found = on_all_ranks(lambda: checkpoints.restore(reporter.emit))
    state, restored = found or (TrainerState(step=0), None)
    if restored is not None:
        reporter.emit(LogMessage(f"resuming after step {state.step:,} of {task.steps:,}"))
        try:
            task.model.load_state_dict(restored.weights)
        except RuntimeError as error:
            raise ResumeMismatchError(
                f"the checkpoint of step {state.step} has other weights than the model ({' '.join(str(error).split())}); put "
                "back the custom terms that the run began with, or start a new run"
            ) from error
    records = records_steps(cuda_graphs)
    memory_advice = OutOfMemoryAdvice(section, key, records)
    with memory_advice:
        engine = make_engine(task.model, section, task.rows, restored, records)
    if section.engine == "auto" and is_gpu(engine.device):
        reporter.emit(LogMessage(describe_engine(engine, records)))
    if records and world_size() > 1:
        compiles = compiles_layers(compile_layers, task.steps, records)
        take_step = open_checked_step(training_step, engine.device, cuda_graphs, compiles, reporter.emit, key)
    else:
        take_step = open_compiled_step(training_step, compile_layers, task.steps, records, reporter.emit)
        take_step = open_step(take_step, engine.device, cuda_graphs, reporter.emit, key)
    log, stop_check = StepLog(task), StopCheck(reporter, section.log_every, engine.device)
    task.on_start(state.step)
    with CheckpointManager(task, engine, checkpoints, reporter.emit, report_to_train) as manager:
        if restored is None and task.evaluates_initial_model:
            state = manager.evaluate_and_save(state, should_evaluate=True)
        elif state.step == task.steps:  # a stop ended the last score
            state = TrainerState(state.step, state.scores, finished=True)
            state = manager.evaluate_and_save(state, should_evaluate=True, must_save=True)
        elif restored is not None:
            is_due = task.should_evaluate(state.step) or (state.step == 0 and task.evaluates_initial_model)
            state = manager.resume(state, is_due)

        log.resume()
        updates = task.steps // section.gradient_accumulation
        stop = manager.stopped or (state.step == 0 and stop_check.ask())
        task.model.train()  # once, and after each evaluation: it takes a millisecond for BERT-base
        for step in range(state.step, 0 if stop else task.steps):
            lr = section.lr * warmup_then_linear(step // section.gradient_accumulation, updates, section.warmup)
            inputs = task.prepare_batch(step, engine.device)  # the teachers' lists are prefetched
            with memory_advice:
                terms = take_step(engine, task, inputs, lr)
            log.add(terms)

            done = step + 1
            is_last = done == task.steps
            is_report = done % section.log_every == 0 or is_last
            if is_report:
                reporter.emit(log.report(done, lr))
            if stop_check.is_due() or is_report:
                ends_update = done % section.gradient_accumulation == 0
                stop = stop_check.ask() and ends_update
            if stop and not is_report:
                reporter.emit(log.report(done, lr))
            if is_report:
                manager.collect()
                log.resume()  # step times exclude the report of a checkpoint
            should_evaluate = task.should_evaluate(done) or is_last
            if should_evaluate or stop:
                log.check_finite(done)
                log.pause()
                state = TrainerState(done, state.scores, finished=is_last)
                state = manager.evaluate_and_save(state, should_evaluate, must_save=stop)
                task.model.train()
                log.resume()
            if stop or manager.stopped:
                break
    engine.close()
    return TrainResult(state, task.steps, log.seconds, log.teacher_wait_s, interrupted=not state.finished)


def training_step(engine: Engine, task: TrainingTask, inputs: StepInputs, lr: float | Tensor) -> dict[str, Tensor]:
    """Run forward pass, loss, backward pass and update; return this worker's shares of the loss terms, on the device."""
    output = engine.forward(inputs.model_inputs)
    share, terms = task.compute_loss(inputs.loss_inputs, output)
    engine.backward(share)
    engine.step(lr)
    return terms


def finished_state(checkpoints: CheckpointStore) -> TrainerState | None:
    """Return the state of a finished training; None if it has not finished or not started."""
    latest = checkpoints.latest()
    try:
        state = load_trainer_state(latest) if latest else None
    except RunError:  # damaged; `train` reports it and resumes from an older checkpoint
        return None
    return state if state is not None and state.finished else None
