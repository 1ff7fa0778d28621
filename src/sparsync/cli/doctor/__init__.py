"""``sparsync doctor``: the facts of the ranks, the judgement on them, and the page that says both."""

from sparsync.cli.doctor.command import DoctorSettings, doctor
from sparsync.cli.doctor.page import Examination

__all__ = ["DoctorSettings", "Examination", "doctor"]
