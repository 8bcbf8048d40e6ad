"""stub"""
from outrider.lm.checkpoint import LoadedModel
from outrider.lm.program import Program
def fuse_model(loaded: LoadedModel) -> Program | None:
    return None
