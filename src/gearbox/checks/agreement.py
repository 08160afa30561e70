"""The checks of a run's files. `src/check.py` prints every finding, and a run refuses the problems at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gearbox.checks import documents, hardware, lengths, model, tokenizer
from gearbox.checks.finding import Finding, Locator, Said
from gearbox.checks.subject import Subject
from gearbox.config.compatibility import conflicts
from gearbox.config.gear import Gear, read_gear
from gearbox.config.job import Job, unused_keys
from gearbox.config.loader import located, read_recipe
from gearbox.errors import UserError
from gearbox.launch.cli import split_arguments
from gearbox.launch.launched_gear import gear_file
from gearbox.planning.gpus import Gpu

GearRead = tuple[Gear | None, list[str]]  # as `read_gear` returns it


class Examined(NamedTuple):
    """The findings of the checks."""

    job: Job | None
    """The recipe and the gear without their wrong keys, if enough is right."""
    findings: list[Finding]

    @property
    def problems(self) -> list[Finding]:
        """The findings that stop a run at its start."""
        return [finding for finding in self.findings if finding.severity == "problem"]

    @property
    def hints(self) -> list[Finding]:
        """The findings that do not stop a run."""
        return [finding for finding in self.findings if finding.severity == "hint"]


def against_gear(subject: Subject) -> Iterator[Said]:
    """Check that gear, ZeRO JSON, environment and packages allow what the recipe asks for."""
    if (job := subject.job) is not None:
        yield from map(Said, conflicts(job.gear, job.recipe, job.recipe_path, job.batch))


def effects(subject: Subject) -> Iterator[Said]:
    """Check that each key that is set has an effect."""
    if (job := subject.job) is not None:
        for line in unused_keys(subject.recipe, job.gear):
            yield Said(located(line, subject.recipe, subject.recipe_path), "hint")


CHECKS: tuple[Callable[[Subject], Iterator[Said]], ...] = (
    against_gear,
    effects,
    lengths.rows,
    lengths.steps,
    model.readable,
    model.trainable,
    model.architecture,
    model.positions,
    model.targets,
    model.added_tokens,
    documents.records,
    documents.teacher,
    tokenizer.template,
    tokenizer.tokens,
    hardware.precision,
    hardware.plan,
)


def examine(recipe_path: Path, overrides: list[str], gear: GearRead, gpu: Gpu | None = None) -> Examined:
    """Read the recipe, and return every finding about it and the gear."""
    read, (usable_gear, gear_problems) = read_recipe(recipe_path, overrides), gear
    said = [*map(Said, read.problems), *map(Said, gear_problems), *(Said(line, "hint") for line in read.hints)]
    job = None
    if read.recipe is not None:
        if usable_gear is not None:
            job = Job.unchecked(recipe_path, read.recipe, usable_gear)
        subject = Subject(recipe_path, read.recipe, job, gpu)
        said += [one for check in CHECKS for one in check(subject)]
    locator = Locator(recipe_path)
    findings = [locator.locate(one) for one in dict.fromkeys(said)]
    wrong = {(one.file, one.key) for one in findings if one.severity == "problem"}
    return Examined(job, [one for one in findings if one.severity == "problem" or (one.file, one.key) not in wrong])


def job_of(recipe_path: Path, overrides: list[str], gear: GearRead) -> Job:
    """Return the job to run, with its hints. Raise UserError with every problem."""
    examined = examine(recipe_path, overrides, gear)
    if examined.job is None or examined.problems:
        raise UserError("\n".join(finding.text for finding in examined.problems))
    return replace(examined.job, hints=tuple(finding.text for finding in examined.hints))


def read_job(arguments: list[str], gear: Gear | None = None) -> Job:
    """Return the job of a run: its recipe, and the gear that it was launched with, unless one is given."""
    recipe_path, overrides = split_arguments(arguments)
    return job_of(recipe_path, overrides, read_gear(*gear_file()) if gear is None else (gear, []))
