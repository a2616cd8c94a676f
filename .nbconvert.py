"""How a notebook becomes a report: `jupyter nbconvert --config ../.nbconvert.py out.ipynb` makes one HTML file of it.

It holds all pictures, leaves the code out, and asks no other computer for anything when it is opened.
"""

c = get_config()  # noqa: F821, nbconvert gives it
c.NbConvertApp.export_format = "html"
c.TemplateExporter.exclude_input = True
c.TemplateExporter.exclude_output_prompt = True
c.TagRemovePreprocessor.enabled = True
c.TagRemovePreprocessor.remove_cell_tags = {"settings"}  # prose on cells that are left out
# Scripts that the template would load: there is no formula, no widget and no interactive figure to need them.
c.HTMLExporter.mathjax_url = ""
c.HTMLExporter.require_js_url = ""
c.HTMLExporter.widget_renderer_url = "data:,"
