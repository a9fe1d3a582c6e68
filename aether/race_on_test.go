//go:build race

package aether

const raceEnabled = true
