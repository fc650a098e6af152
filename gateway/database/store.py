"""The store: all access to the database, with one class for each subject.

Rows that the store returns are detached and must not be changed. Every change is a method of the subject's class, or
code in `begin` of the only file that uses the table.
"""

from __future__ import annotations

from gateway.database.checkpoints import CheckpointRows
from gateway.database.connection import Database
from gateway.database.moves import MoveRows
from gateway.database.operations import OperationRows
from gateway.database.sessions import LiveRows, ModelRows, SamplerRows, SessionRows
from gateway.database.settings import SettingRows
from gateway.database.tables.sessions import Model, SamplingSession
from gateway.metrics import Metrics


class Store(Database):
    def __init__(self, url: str, metrics: Metrics) -> None:
        super().__init__(url, metrics)
        models, samplers = LiveRows(self, Model), LiveRows(self, SamplingSession)
        self.sessions = SessionRows(self, of_sessions=(models, samplers))
        self.models = ModelRows(self, models)
        self.moves = MoveRows(self, models.forget)
        self.samplers = SamplerRows(self, samplers)
        self.checkpoints = CheckpointRows(self)
        self.operations = OperationRows(self)
        self.settings = SettingRows(self)
