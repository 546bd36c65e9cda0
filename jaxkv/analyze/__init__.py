"""What a model does with its past, measured: data for policies."""

from jaxkv.analyze.heads import retrieval_heads, retrieval_scores
from jaxkv.analyze.profile import fit_profile
from jaxkv.analyze.surrogate import fit_surrogate

__all__ = ["fit_profile", "fit_surrogate", "retrieval_heads", "retrieval_scores"]
