"use strict";
// Draws the charts of a report from the packed data that stands in the page; nothing is loaded from elsewhere.

// The text that was compressed with gzip and written as base64 into the element of this id.
async function unpacked(id) {
  const letters = atob(document.getElementById(id).textContent.trim());
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function runScript(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.appendChild(script);
}

// Colours of the page as it is shown now (light, dark, on paper), for what Plotly cannot take from a stylesheet.
function colours(layout) {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const changes = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": value("--ink") };
  changes["hoverlabel.bgcolor"] = value("--panel");
  changes["hoverlabel.font.color"] = value("--ink");
  for (const axis of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
    changes[axis + ".gridcolor"] = value("--line");
    changes[axis + ".zerolinecolor"] = value("--line");
    changes[axis + ".linecolor"] = value("--line");
  }
  return changes;
}

// Charts over the time of the run move together: a zoom of one is a zoom of all.
function link(charts) {
  let following = false;
  for (const chart of charts) {
    chart.on("plotly_relayout", async (change) => {
      if (following || !Object.keys(change).some((key) => /^xaxis\d*\.(range|autorange)/.test(key))) return;
      following = true;
      const axis = chart._fullLayout.xaxis;
      const others = charts.filter((other) => other !== chart);
      await Promise.all(others.map((other) => Plotly.relayout(other, seen(other, axis))));
      following = false;
    });
  }
}

function seen(chart, axis) {
  const changes = {};
  for (const name of Object.keys(chart.layout).filter((key) => /^xaxis\d*$/.test(key))) {
    if (axis.autorange) changes[name + ".autorange"] = true;
    else changes[name + ".range"] = [...axis.range];
  }
  return changes;
}

async function draw() {
  runScript(await unpacked("plotly"));
  const figures = JSON.parse(await unpacked("figures"));
  const charts = [...document.querySelectorAll(".chart")];
  const options = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" };
  for (const [i, chart] of charts.entries()) {
    const { data, layout } = figures[i];
    chart.textContent = "";
    await Plotly.newPlot(chart, data, { ...layout, autosize: true }, options);
    await Plotly.relayout(chart, colours(chart.layout));
  }
  link(charts.filter((chart) => chart.dataset.axis === "time"));
  const recolour = () => charts.forEach((chart) => Plotly.relayout(chart, colours(chart.layout)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  const fitToPaper = (printing) => {
    for (const chart of charts) {
      const size = printing ? { width: 680, autosize: false } : { width: null, autosize: true };
      Plotly.relayout(chart, { ...size, ...colours(chart.layout) });
    }
  };
  matchMedia("print").addEventListener("change", (event) => fitToPaper(event.matches));
  document.documentElement.dataset.drawn = String(charts.length);
}

draw().catch((error) => {
  document.documentElement.dataset.drawn = "failed";
  for (const chart of document.querySelectorAll(".chart")) {
    chart.classList.add("failed");
    chart.textContent = "This browser cannot draw the charts (" + error + "). It takes one of 2023 or later.";
  }
});
