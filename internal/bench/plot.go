package bench

import (
	"fmt"
	"math"
	"strings"
)

// Layout of the plot, in pixels.
const (
	plotWidth, panelHeight          = 720, 220
	plotLeft, plotRight             = 70, 130
	panelTop, panelBottom           = 30, 40
	plotInner                       = plotWidth - plotLeft - plotRight
	panelInner                      = panelHeight - panelTop - panelBottom
	colourMain, colourSide, colour3 = "#1f77b4", "#d62728", "#2ca02c"
)

// line is one curve of a panel.
type line struct {
	name, colour string
	y            []float64
}

// plot draws what memory and creates cost against the count, as SVG.
func (d *Density) plot() string {
	var x []float64
	each, used := line{"KiB each", colourMain, nil}, line{"GiB in use", colourMain, nil}
	p50, p90, p99 := line{"p50", colourMain, nil}, line{"p90", colour3, nil}, line{"p99", colourSide, nil}
	rate := line{"creates/s", colourMain, nil}
	for _, p := range d.Points {
		x = append(x, float64(p.Count))
		each.y = append(each.y, float64(p.Each)/1024)
		used.y = append(used.y, float64(p.UsedBytes)/(1<<30))
		p50.y, p90.y, p99.y = append(p50.y, p.Latency.P50), append(p90.y, p.Latency.P90), append(p99.y, p.Latency.P99)
		rate.y = append(rate.y, p.Rate)
	}
	panels := []struct {
		title string
		lines []line
	}{
		{"Memory of one sandbox, kernel included (KiB)", []line{each}},
		{"Memory in use, whole machine (GiB)", []line{used}},
		{"Creates per second", []line{rate}},
		{"Create latency (ms)", []line{p50, p90, p99}},
	}
	var w strings.Builder
	fmt.Fprintf(&w, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", plotWidth, panelHeight*len(panels))
	w.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	for i, p := range panels {
		fmt.Fprintf(&w, `<g transform="translate(%d,%d)">`+"\n", plotLeft, i*panelHeight+panelTop)
		panel(&w, p.title, x, p.lines)
		w.WriteString("</g>\n")
	}
	w.WriteString("</svg>\n")
	return w.String()
}

// panel draws lines over x, from 0 on both axes.
func panel(w *strings.Builder, title string, x []float64, lines []line) {
	maxX, maxY := largest(x), 0.0
	for _, l := range lines {
		maxY = math.Max(maxY, largest(l.y))
	}
	stepX, stepY := tick(maxX), tick(maxY)
	maxX, maxY = math.Ceil(maxX/stepX)*stepX, math.Ceil(maxY/stepY)*stepY
	px := func(v float64) float64 { return v / maxX * plotInner }
	py := func(v float64) float64 { return panelInner - v/maxY*panelInner }
	fmt.Fprintf(w, `<text x="0" y="-10" font-weight="bold">%s</text>`+"\n", title)
	for v := 0.0; v <= maxY; v += stepY {
		fmt.Fprintf(w, `<line x1="0" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="-6" y="%.1f" text-anchor="end">%s</text>`+"\n", plotInner, py(v), py(v), py(v)+4, short(v))
	}
	for v := 0.0; v <= maxX; v += stepX {
		fmt.Fprintf(w, `<text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", px(v), panelInner+16, short(v))
	}
	fmt.Fprintf(w, `<text x="%d" y="%d">live</text>`+"\n", plotInner+8, panelInner+16)
	for i, l := range lines {
		var points strings.Builder
		for j := range l.y {
			fmt.Fprintf(&points, "%.1f,%.1f ", px(x[j]), py(l.y[j]))
		}
		fmt.Fprintf(w, `<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>`+"\n", l.colour, strings.TrimSpace(points.String()))
		fmt.Fprintf(w, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", plotInner+8, 10+16*i, l.colour, l.name)
	}
}

func largest(v []float64) (most float64) {
	for _, f := range v {
		most = math.Max(most, f)
	}
	return most
}

// tick is a round step that cuts a length into four to ten.
func tick(length float64) float64 {
	if length <= 0 {
		return 1
	}
	step := math.Pow(10, math.Floor(math.Log10(length)))
	for _, part := range []float64{10, 5, 4, 2} {
		if length/(step/part) <= 10 {
			return step / part
		}
	}
	return step
}
