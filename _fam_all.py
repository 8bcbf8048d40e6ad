import tempfile, torch, warnings
from pathlib import Path
torch.set_num_threads(1)
from tests.outrider.lm import tiny
from tests.outrider.parallel.test_shards import alone, history
from tests.outrider.parallel.started import leading
if __name__ == "__main__":
    for name in tiny.FAMILIES:
        d = Path(tempfile.mkdtemp())
        tiny.save(tiny.FAMILIES[name](), d)
        try:
            e = history(alone(d))
            with leading(d) as p:
                f = history(p)
                print("RES", name, f"{float((f-e).abs().max()/e.abs().max()):.1e}", {l.kv_heads for l in p.loaded.layers}, flush=True)
        except Exception as x:
            print("RES", name, type(x).__name__, str(x)[:150], flush=True)
