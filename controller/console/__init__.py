"""The console: one page that shows and steers a fleet in a browser, served by the admin API at `/console/`.

Plain files, no build step: `static/` holds the page, its modules and styles, and uPlot for the charts (`vendor/`, with
its licence). The page talks to `/v1` of the host it came from and to nothing else; a Content-Security-Policy holds it
to that.
"""

from controller.console.routes import install as install
