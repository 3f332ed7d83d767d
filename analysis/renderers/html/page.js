"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const plots = [...document.querySelectorAll("[data-chart]")];
  const theme = document.getElementById("theme");
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;

  // The style sheet's colours as they are now: plotly.js knows no CSS variables.
  function colours() {
    const found = new Map();
    return (name) => {
      if (!found.has(name)) {
        probe.style.color = `var(${name})`;
        found.set(name, getComputedStyle(probe).color);
      }
      return found.get(name);
    };
  }

  function painted(part, colour) {
    if (typeof part === "string") {
      const name = /^var\((--[a-z-]+)\)$/.exec(part);
      return name ? colour(name[1]) : part;
    }
    if (Array.isArray(part)) {
      return typeof part[part.length - 1] === "number" ? part : part.map((item) => painted(item, colour));
    }
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(
      Object.entries(part).map(([key, value]) => [key, painted(value, colour)]));
  }

  function layoutOf(chart, plot, colour) {
    const layout = painted(chart.layout, colour);
    for (const name of Object.keys(layout)) {
      if (!/^[xy]axis\d*$/.test(name)) continue;
      layout[name] = {
        gridcolor: colour("--rule"), linecolor: colour("--soft"), zeroline: false,
        ...layout[name],
      };
    }
    return {
      paper_bgcolor: colour("--card"),
      plot_bgcolor: colour("--card"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--text") },
      margin: { l: 50, r: 12, t: 8, b: 40 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal", font: { size: 12 } },
      hoverlabel: {
        bgcolor: colour("--card"), bordercolor: colour("--soft"), font: { color: colour("--text") },
      },
      // A finger that drags wants to scroll the page.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      separators: ".,",
      height: plot.clientHeight,
      ...layout,
    };
  }

  function drawn(plot, colour, range) {
    const chart = charts[plot.dataset.chart];
    const layout = layoutOf(chart, plot, colour);
    if (range) layout.xaxis = { ...layout.xaxis, range, autorange: false };
    return Plotly.react(plot, painted(chart.data, colour), layout, {
      responsive: true, displayModeBar: false, doubleClick: "reset",
    });
  }

  function drawAll() {
    const colour = colours();
    for (const plot of plots) drawn(plot, colour, plot.zoomed);
  }

  // What shows all of an axis again.
  function whole(plot, name) {
    const axis = charts[plot.dataset.chart].layout[name];
    return axis.range ? { [`${name}.range`]: [...axis.range] }
      : { [`${name}.autorange`]: axis.autorange || true };
  }

  // Charts over time show the same part of it; without a range, all of it.
  function together(plot, range) {
    const moved = charts[plot.dataset.chart].overTime
      ? plots.filter((other) => charts[other.dataset.chart].overTime) : [plot];
    for (const other of moved) {
      other.zoomed = range;
      other.leads = false;
      Plotly.relayout(other, range ? { "xaxis.range": [...range] } : whole(other, "xaxis"))
        .then(() => { other.leads = true; });
    }
  }

  function zoom(plot, how) {
    if (how === "reset") {
      together(plot, null);
      const axes = Object.keys(plot.layout).filter((name) => /^yaxis\d*$/.test(name));
      Plotly.relayout(plot, Object.assign({}, ...axes.map((name) => whole(plot, name))));
      return;
    }
    const [low, high] = plot._fullLayout.xaxis.range;
    const width = high - low;
    const [from, to] = {
      in: [0.25, -0.25], out: [-0.5, 0.5], left: [-0.25, -0.25], right: [0.25, 0.25],
    }[how];
    together(plot, [low + from * width, high + to * width]);
  }

  function follow(plot) {
    plot.leads = true;
    plot.on("plotly_relayout", (change) => {
      if (!plot.leads) return;
      if (change["xaxis.autorange"]) together(plot, null);
      else if (change["xaxis.range[0]"] !== undefined) {
        together(plot, [change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      }
    });
    plot.closest("figure").addEventListener("click", (event) => {
      const button = event.target.closest("[data-zoom]");
      if (button) zoom(plot, button.dataset.zoom);
    });
  }

  drawAll();
  plots.forEach(follow);
  theme.addEventListener("change", () => {
    document.documentElement.style.colorScheme = theme.value;
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);
  document.documentElement.dataset.ready = "yes";
})();
