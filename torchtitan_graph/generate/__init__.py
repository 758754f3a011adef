"""Continue texts with a trained model: python -m torchtitan_graph.generate"""

from torchtitan_graph.generate.decoding import Decoding, why_no_cache
from torchtitan_graph.generate.generation import Options, generate
from torchtitan_graph.generate.samples import Samples
from torchtitan_graph.generate.sampling import Sampling
from torchtitan_graph.generate.texts import Text

__all__ = ["Decoding", "Options", "Samples", "Sampling", "Text", "generate", "why_no_cache"]
