"""From folders of pictures and captions to finite, bucketed, cached examples. Nothing here knows a model."""
