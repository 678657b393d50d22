"""Curves of a training in progress, in a notebook."""

import io

import matplotlib.pyplot as plt
from transformers import TrainerCallback

from .figures import draw_progress


class LiveCurves(TrainerCallback):
    """
    Draws reward, entropy, χ² and gradient response efficiency of a [`OPOTrainer`] below the notebook cell that
    trains, updated in place: in Jupyter, in Colab, and in notebooks executed without a browser. Unlike a dashboard
    (trackio), it needs no server, and the stored notebook keeps the curves.

    Example:

    ```python
    >>> trainer.add_callback(LiveCurves())
    >>> trainer.train()
    ```
    """

    every = 2  # optimizer steps between two updates

    def on_train_begin(self, args, state, control, **kwargs):
        self._place = None  # each training gets its own curves

    def on_log(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self._draw(state)

    def on_train_end(self, args, state, control, **kwargs):
        self._draw(state)

    def _draw(self, state):
        if not state.is_world_process_zero:
            return
        from IPython.display import Image, display

        figure = draw_progress(state.log_history, state.max_steps)
        png = io.BytesIO()
        figure.savefig(png)
        plt.close(figure)
        picture = Image(png.getvalue())
        if self._place is None:
            self._place = display(picture, display_id=True)
        else:
            self._place.update(picture)
