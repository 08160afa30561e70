"""Prove a recipe: train it under every gear, resume, export and reload it, and record each difference.

Each gear takes these steps, on a rehearsal of the recipe. The first gear that runs is the reference of the others.

Train    A run of four steps, which saves checkpoints. Every step is compared with that of the reference.
Resume   The same gear resumes from the checkpoint after two steps. The result is compared with the run above.
Move     The gear resumes from a checkpoint of another gear. The result is compared with the reference.
Export   The tensors of the exported model are compared with those of the reference.
Reload   A fresh process loads all exported models, and compares their logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
from rich.console import Console

from gearbox import ROOT, filesystem, processes
from gearbox.checkpoint.manifest import CorruptCheckpoint
from gearbox.config.gear import Gear
from gearbox.config.loader import matches
from gearbox.config.recipe import Recipe
from gearbox.distributed import engine, forked_ranks
from gearbox.errors import UserError
from gearbox.launch.environment import CALLER_RELOADS
from gearbox.model import loading
from gearbox.pages import run_comparison
from gearbox.proving import description, exports
from gearbox.proving.description import short
from gearbox.proving.record import Compared, Facts, GearResult, Proof, all_finite, read_proof
from gearbox.proving.runs import Ended, delete_large, ended, launch
from gearbox.proving.settings import STEPS, Change, label
from gearbox.sharding import unwrap
from gearbox.training import finish, loop, session  # noqa: F401  warm: they import all that a run does

RECORD = "proof.json"
SAVED_STEP = STEPS // 2
LIMITS = forked_ranks.Limits(hang=900)  # the first start of zero3_nvme compiles for minutes
ROW_TOKENS, LONG_ROW_TOKENS = 256, 1024  # in tokens of a real tokenizer, and in bytes
SMALL_VOCABULARY = 8192  # so that longer rows cost little
LOGITS_FACTOR = 10  # logits add the differences of all layers' weights

Main = Callable[[list[str], Gear], int]


@dataclass(frozen=True)
class Request:
    """The recipe, the gears and the folder of a proof."""

    recipe_path: Path
    recipe: Recipe
    arguments: list[str]
    """The recipe's path and all overrides."""
    changes: list[Change]
    gears: list[Gear]
    folder: Path
    resumes: bool = True
    """False only trains and exports, without resuming."""

    def key(self) -> str:
        """Return an identifier of the recipe, its local files, the gears and the code."""
        digest = xxhash.xxh3_128()
        for part in (self.recipe.model_dump_json(), self.arguments, [label(gear) for gear in self.gears], self.resumes):
            digest.update(f"{part}\n".encode())
        files = [path for top in ("src", "accelerate_configs", "ds_configs") for path in (ROOT / top).rglob("*")]
        used = [path for path in files if path.suffix in (".py", ".yaml", ".json")]
        used += [*(gear.path for gear in self.gears), *self._local_files()]
        for path in sorted({path for path in used if path.is_file()}):
            digest.update(f"{path.name} {filesystem.digest_of(path)}\n".encode())
        return digest.hexdigest()

    def _local_files(self) -> Iterator[Path]:
        """Yield the files of data and tokenizer that are not on the Hub, and the folders above them."""
        data, model = self.recipe.data, Path(self.recipe.model.name)
        for place in (place for source in data.sources for place in matches(source.path)):
            yield from (place, *place.rglob("*"))
        yield from (*model.glob("*.json"), *model.glob("*.jinja"))
        yield from map(Path, [data.chat_template] if data.chat_template else [])


class Prover:
    """Run the steps of each gear, and keep the results in a folder."""

    def __init__(self, request: Request, main: Main, screen: Console) -> None:
        """Read what an earlier, killed command has finished. `main` is the training script's."""
        self.request, self.main, self.screen = request, main, screen
        self.folder, self.path = request.folder, request.folder / RECORD
        key, recipe = request.key(), request.recipe
        found = read_proof(self.path)
        self.proof = Proof(key=key, recipe=short(str(request.recipe_path)), method=recipe.method, steps=STEPS)
        self.proof.changes = [(one.key, one.value, one.why) for one in request.changes]
        if found is not None and found.key == key and not found.is_complete:
            self.proof = found
            self.screen.print(f"resuming: {len(found.gears)} of {len(request.gears)} gears are done in {self.folder}")
        precisions = {engine.precision(gear) for gear in request.gears}
        self.proof.precision = "bf16" if "bf16" in precisions else "no"
        self.tolerances = run_comparison.TOLERANCES[self.proof.precision]

    def prove(self) -> Proof:
        """Take every step that is not recorded yet. Raise UserError if the model or the data cannot be read."""
        proof, request = self.proof, self.request
        proof.made = description.made()
        forked_ranks.warm_up()
        if proof.facts is None:
            proof.facts = self._describe()
            proof.write(self.path)
        unwrap.model_class(loading.load_config(request.recipe.model, rehearse=True))  # imports the family before forks
        for number, gear in enumerate(request.gears, start=1):
            if any(one.name == label(gear) for one in proof.gears):
                continue
            result = self._prove(gear)
            proof.gears.append(result)
            proof.write(self.path)
            said = result.outcome + "".join(f"; {problem}" for problem in result.problems)
            self.screen.print(f"{number} of {len(request.gears)}: {result.name}: {said}")
        if proof.reference is None:
            self.screen.print("no gear has run")
        elif not proof.is_reloaded:
            self._move_to_reference(proof.reference)
            self._reload()
            proof.is_reloaded = True
        self._delete_large()
        proof.is_complete = True
        proof.write(self.path)
        return proof

    def _describe(self) -> Facts:
        """Describe the recipe's model and data in a forked process, so that this one keeps few threads."""
        path = self.folder / "facts.json"
        recipe = self.request.recipe

        def work() -> None:
            filesystem.atomic_write(path, description.describe(recipe).model_dump_json())

        codes, output = forked_ranks.fork_ranks(1, {}, work, limits=LIMITS)
        if end := ended(codes, output, path).problem:
            raise UserError(end)
        facts = Facts.model_validate_json(path.read_bytes())
        filesystem.remove(path)
        return facts

    def _prove(self, gear: Gear) -> GearResult:
        """Train, resume, move and export under a gear."""
        name = label(gear)
        result = GearResult(name=name, gear=gear.name, num_ranks=gear.num_processes)
        end = self._train(gear, name)
        run, reference = self.folder / name, self.proof.reference
        if end.is_refusal and not run_comparison.read_steps(run):
            result.outcome, result.problems = "refused", [short(end.problem)]
            return result
        result.fail(short(end.problem))
        if end.problem:
            return result
        result.losses = [line["loss"] for line in run_comparison.read_steps(run)]
        if not all_finite([number for number in result.losses if number is not None]):
            result.fail("its loss is not finite")
        with self._failures(result):
            if reference is not None:
                result.parity = self._compare(result, self.folder / reference.name, run)
                result.exported = exports.compare(self.folder / reference.name / "model", run / "model")
            if self.request.resumes:
                result.resumed = self._resume(result, gear, run, run)
                if reference is not None:
                    origin = self._newest_origin()
                    result.moved = self._resume(result, gear, origin, self.folder / reference.name)
                    if origin.name != reference.name:
                        filesystem.remove(origin / "checkpoints")
        return result

    def _newest_origin(self) -> Path:
        """Return the run of the last gear that has not failed, or of the first one."""
        assert self.proof.reference is not None
        names = [self.proof.reference.name, *(one.name for one in self.proof.of("ran"))]
        return [run for name in names if ((run := self.folder / name) / "checkpoints").is_dir()][-1]

    def _train(self, gear: Gear, name: str, *more: str) -> Ended:
        """Train under a gear in a new folder with this name."""
        filesystem.remove(self.folder / name)
        arguments = [*self.request.arguments, *more]
        if processes.num_visible_gpus():  # a forked process cannot use CUDA
            return launch(gear, self.folder, arguments, name)
        environment = forked_ranks.launcher_environment(gear.path, gear.num_processes) | {CALLER_RELOADS: "1"}
        given = [*arguments, f"run.dir={self.folder}", f"run.name={name}"]
        codes, output = forked_ranks.fork_ranks(
            gear.num_processes, environment, lambda: self.main(given, gear), limits=LIMITS
        )
        log = self.folder / f"{name}.log"
        filesystem.atomic_write(log, output)
        return ended(codes, output, log)

    def _resume(self, result: GearResult, gear: Gear, origin: Path, reference: Path) -> Compared | None:
        """Resume from a checkpoint of the run `origin`, and compare the result with the run `reference`."""
        name = f"{result.name}-from-{origin.name}"
        checkpoint = origin / "checkpoints" / f"step-{SAVED_STEP}"
        end = self._train(gear, name, f"run.resume={checkpoint}")
        compared = None
        if end.problem:
            result.fail(f"it cannot resume from {origin.name}: {short(end.problem)}")
        else:
            compared = self._compare(result, reference, self.folder / name, SAVED_STEP)
        filesystem.remove(self.folder / name)
        return compared.model_copy(update={"origin": origin.name}) if compared else None

    def _compare(self, result: GearResult, reference: Path, run: Path, after: int = 0) -> Compared | None:
        """Compare two runs. Record a difference that exceeds its tolerance."""
        one = run_comparison.Compared(run.name, run, after=after)
        one.compare_with(run_comparison.Compared(reference.name, reference))
        if text := one.explanation(self.tolerances):
            result.fail(f"{'resumed, ' if after else ''}{short(text)}")
        if one.problem:
            return None
        return Compared(
            origin=reference.name,
            largest={name: one.largest(name)[0] for name in run_comparison.QUANTITIES},
            is_exact=one.is_exact,
        )

    @contextmanager
    def _failures(self, result: GearResult) -> Iterator[None]:
        """Record what cannot be compared as a failure of the gear."""
        try:
            yield
        except (UserError, CorruptCheckpoint, OSError, ValueError) as error:
            result.fail(short(str(error)))

    def _move_to_reference(self, reference: GearResult) -> None:
        """Resume under the first gear from a checkpoint of the last one."""
        origin = self._newest_origin() if self.request.resumes else self.folder / reference.name
        if origin.name != reference.name:
            gear = next(gear for gear in self.request.gears if label(gear) == reference.name)
            with self._failures(reference):
                reference.moved = self._resume(reference, gear, origin, self.folder / reference.name)

    def _reload(self) -> None:
        """Load the exported models in a fresh process, and record how far their logits differ."""
        assert self.proof.facts is not None
        ran = {str(self.folder / one.name / "model"): one for one in self.proof.gears if one.losses}
        self.screen.print(f"reloading {len(ran)} exported models in a fresh process")
        trusts = self.request.recipe.model.trust_remote_code
        found = exports.reload([*map(Path, ran)], self.proof.facts.tokens, trusts)
        for folder, difference in found.items():
            if isinstance(difference, str):
                ran[folder].fail(f"its export cannot be used: {short(difference)}")
                continue
            ran[folder].logits = difference
            if difference > LOGITS_FACTOR * self.tolerances["weights"]:
                ran[folder].fail(f"the logits of its reloaded export differ by {difference:.0e}")

    def _delete_large(self) -> None:
        for gear in self.request.gears:
            delete_large(self.folder / label(gear))


def row_tokens(recipe: Recipe) -> int:
    """Return the most tokens of a row: many runs with a large vocabulary would take long."""
    tokenizer = loading.load_tokenizer(recipe.model, recipe.data.chat_template, rehearse=True)
    return LONG_ROW_TOKENS if len(tokenizer) <= SMALL_VOCABULARY else ROW_TOKENS


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder of a proof and lock it. Raise UserError if another command is using it."""
    try:
        filesystem.make_folder(folder)
        lock = filesystem.Lock(folder / "lock", 0)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}") from None
    if lock.is_taken:
        raise UserError(f"{folder}: another command is proving this recipe; wait for it, or give another run.dir")
    try:
        yield
    finally:
        lock.release()
