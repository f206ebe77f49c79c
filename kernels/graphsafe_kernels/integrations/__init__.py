"""Models that other people wrote, on these operators: ``adapt(model)``; and their imports: ``install_fla_names()``.

==================  ===========================================================================
``models``          ``adapt``: what a model is made of, what is replaced, what is refused
``packing``         a packed batch as a model's layers see it
``mixers``          the linear-attention layers of ``transformers``
``attention``       full attention over a packed batch without a mask read on the host
``experts``         experts that are not chosen on the host
``fla_models``      the layers of flash-linear-attention's models
``fla_names``       flash-linear-attention's operators under their own import names
==================  ===========================================================================

Nothing here imports ``transformers`` or ``fla`` before a model of theirs is adapted.
"""

from graphsafe_kernels.integrations.fla_names import install_fla_names
from graphsafe_kernels.integrations.models import adapt

__all__ = ["adapt", "install_fla_names"]
