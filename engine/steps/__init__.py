"""A step from plan to tokens: inputs, the runner, masks, sampling."""
