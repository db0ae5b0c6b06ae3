"""Logits are followed through a division to what compares their softmax with another one."""

import math

import torch

from boltcutter.diagnosis.temperatures import Temperatures


def test_a_student_and_a_teacher_have_their_temperatures() -> None:
    found = Temperatures()
    logits, teacher = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    scaled = logits / 2.0
    student, target = scaled.log_softmax(1), teacher.softmax(1)
    found.follow("__truediv__", (logits, 2.0), {}, scaled)
    found.follow("log_softmax", (scaled, 1), {}, student)
    found.follow("softmax", (teacher, 1), {}, target)
    found.follow("__mul__", (target, student), {}, target * student)
    ((one, other),) = found.compared
    assert (one.temperature, other.temperature) == (2.0, 1.0)
    assert torch.equal(one.logits, logits)
    assert torch.equal(other.logits, teacher)


def test_a_temperature_that_is_learned_is_unknown() -> None:
    found = Temperatures()
    logits, scale = torch.randn(4, 3), torch.ones((), requires_grad=True)
    scaled = logits / scale
    found.follow("__truediv__", (logits, scale), {}, scaled)
    assert math.isnan(found.softened(scaled).temperature)
