"""Take the pictures of the programs for the docs; run this after the page of the dashboard has changed.

They are ``docs/images/program-*.png``.

The programs of ``examples/`` run on a cluster of two workers, and a headless Chromium opens the page of the
dashboard meanwhile. The notebook is executed, and rendered as JupyterLab renders it; its picture has the
notebook, and the dashboard of its cluster while the queries ran, side by side as in two windows.

    pip install nbconvert ipykernel "tpchgen-cli==4.*"
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import dask.dataframe as dd
from distributed import Client
from PIL import Image

import dask_gpurt
from benchmarks.tpch.tables import prepare
from ci.dashboard_pictures import IMAGES, UPDATES_S, shrink
from examples import flights, near_duplicates
from tests.helpers import browser
from tests.helpers.in_process import until

EXAMPLES = Path(__file__).parents[1] / "examples"
#: The page of the dashboard, and the parts of the picture of the notebook.
SIZE, NOTEBOOK, BESIDE = (1200, 800), (640, 880), (1060, 880)
YEARS, DOCUMENTS, SCALE = 6, 800, 0.3
#: Counts the rows of the table of shuffles in a page of the dashboard.
SHUFFLES = "document.querySelectorAll('#shuffles td:first-child').length"


def run_flights(folder: Path) -> None:
    flights.write_parquet(flights.data_folder(), folder / "tables", YEARS)
    flights.run(folder / "tables", folder / "delays")


def run_near_duplicates(folder: Path) -> None:
    documents = dd.from_map(near_duplicates.make_documents, range(8), rows=DOCUMENTS).persist()
    len(near_duplicates.without_near_duplicates(documents))


@contextmanager
def running(program: Callable[[Path], None], folder: Path) -> Iterator[str]:
    """Run a program on a cluster; yields the address of its dashboard."""
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        dask_gpurt.enable(client)
        thread = threading.Thread(target=program, args=(folder,), name="program")
        thread.start()
        try:
            yield client.dashboard_link.removesuffix("/status")
        finally:
            thread.join()


async def opened(visit: Any, base: str, size: tuple[int, int], shuffles: int) -> browser.Page:
    """Open the dashboard's page, and wait until the program has begun so many shuffles."""
    page: browser.Page = await visit(f"{base}/gpurt")
    width, height = size
    await page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )
    await page.holds(f"{SHUFFLES} >= {shuffles}")
    await asyncio.sleep(UPDATES_S)
    return page


async def of_program(program: Callable[[Path], None], shuffles: int, folder: Path, name: str) -> None:
    """Take the picture of the dashboard's page while a program runs."""
    with running(program, folder) as base:
        async with browser.browser(folder / "profile") as visit:
            page = await opened(visit, base, SIZE, shuffles)
            await page.screenshot(folder / "taken.png")
    shrink(folder / "taken.png", IMAGES / f"{name}.png")


async def of_notebook(folder: Path, name: str) -> None:
    """Take the picture of the notebook, beside that of the dashboard while its queries run."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    prepare(folder / "tables", scale=SCALE, parts=8)
    # Warnings of pandas about Dask's own code would show paths of this machine.
    os.environ |= {"TPCH_TABLES": str(folder / "tables"), "PYTHONWARNINGS": "ignore"}
    notebook = nbformat.read(EXAMPLES / "tpch.ipynb", as_version=4)
    kernel = NotebookClient(notebook, resources={"metadata": {"path": str(EXAMPLES)}}, timeout=900)
    executing = asyncio.create_task(kernel.async_execute())

    def links() -> list[str]:
        printed = [out.get("text", "") for cell in notebook.cells for out in getattr(cell, "outputs", [])]
        return re.findall(r"(http://\S+)/gpurt", "".join(printed))

    await until(lambda: bool(links()) or executing.done())
    async with browser.browser(folder / "profile") as visit:
        page = await opened(visit, links()[0], BESIDE, 10)
        await page.screenshot(folder / "beside.png")
        await executing
        html, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
        (folder / "notebook.html").write_text(html)
        width, height = NOTEBOOK
        page = await visit((folder / "notebook.html").as_uri())
        await page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await page.holds("document.readyState === 'complete'")
        await page.value("document.querySelectorAll('h2')[0].scrollIntoView()")
        await asyncio.sleep(1)
        await page.screenshot(folder / "notebook.png")
    whole = Image.new("RGB", (NOTEBOOK[0] + BESIDE[0] + 8, NOTEBOOK[1]), "#888888")
    whole.paste(Image.open(folder / "notebook.png"), (0, 0))
    whole.paste(Image.open(folder / "beside.png"), (NOTEBOOK[0] + 8, 0))
    whole.save(folder / "taken.png")
    shrink(folder / "taken.png", IMAGES / f"{name}.png")


@click.command()
@click.argument("which", nargs=-1, type=click.Choice(["flights", "near-duplicates", "tpch"]))
def main(which: tuple[str, ...]) -> None:
    for name in which or ("flights", "near-duplicates", "tpch"):
        with tempfile.TemporaryDirectory(prefix="gpurt-picture-") as text:
            folder = Path(text)
            match name:
                case "flights":
                    asyncio.run(of_program(run_flights, 3, folder, "program-flights"))
                case "near-duplicates":
                    asyncio.run(of_program(run_near_duplicates, 12, folder, "program-near-duplicates"))
                case "tpch":
                    asyncio.run(of_notebook(folder, "program-tpch"))


if __name__ == "__main__":
    main()
