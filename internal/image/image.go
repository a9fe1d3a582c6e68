package image

// Kinds of layer that a sandbox composes.
const (
	KindBase      = "base"
	KindWorkspace = "workspace"
	KindToolkit   = "toolkit"
	KindDiff      = "diff" // what a sandbox changed
)

// Image describes a stored image. Names are not part of it: the catalogue has them.
type Image struct {
	Digest        string  `json:"digest"` // "sha256:…" over what the image is: not the time, nor where it is
	CreatedUnixMS int64   `json:"created_unix_ms"`
	SizeBytes     int64   `json:"size_bytes"` // on disk, all layers
	Files         int64   `json:"files"`      // entries, all layers
	Layers        []Layer `json:"layers"`     // lowest first
	// Made are the layers that the image was made of, if some were merged since; the digest is over these.
	Made []Layer `json:"made,omitempty"`

	Config Config   `json:"config"`
	Notes  []string `json:"notes,omitempty"` // what the import left out, and why

	Snapshot *Snapshot `json:"snapshot,omitempty"` // if it was made of a sandbox
}

// Snapshot says what an image was made of that is a sandbox's snapshot.
type Snapshot struct {
	Source    string            `json:"source"`              // the sandbox's id
	Parents   []string          `json:"parents"`             // digests of images
	Parts     []Part            `json:"parts,omitempty"`     // that the sandbox was composed of, the base first; none: of one image
	Labels    map[string]string `json:"labels,omitempty"`    // the sandbox's
	Temporary bool              `json:"temporary,omitempty"` // goes with the last sandbox that uses it
	Entries   int64             `json:"entries"`             // of the newest layer
	Bytes     int64             `json:"bytes"`
	LeftOut   []string          `json:"left_out,omitempty"` // paths, the first hundred
	Omitted   int64             `json:"left_out_count,omitempty"`
	Notes     []string          `json:"notes,omitempty"`
}

// Part is one image of a composition, with its layers as they were in it.
type Part struct {
	Kind   string  `json:"kind"`
	Name   string  `json:"name,omitempty"`
	Digest string  `json:"digest"`
	Layers []Layer `json:"layers,omitempty"` // lowest first, not where they are
}

// Layer is one read-only layer: a metadata blob and, unless everything fits in
// it, a data blob. Digests are hex SHA-256.
type Layer struct {
	Kind       string `json:"kind"`
	MetaDigest string `json:"meta_digest"`
	MetaSize   int64  `json:"meta_size"`
	DataDigest string `json:"data_digest,omitempty"`
	DataSize   int64  `json:"data_size,omitempty"`

	// Of a layer that a snapshot made: the views (package snapshot) of the layers that it was
	// made on, and with it; and the layers that it was merged from, if it was.
	Parent   string `json:"parent,omitempty"`
	View     string `json:"view,omitempty"`
	Replaces string `json:"replaces,omitempty"` // "META DATA,META DATA", lowest first
	// Where the layer is in the object store (package chunk); not part of what it is.
	MetaObject string `json:"meta_object,omitempty"`
	MapObject  string `json:"map_object,omitempty"`
}

// Config is what an image says about running programs in it.
type Config struct {
	Env        []string          `json:"env,omitempty"` // KEY=value
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	User       string            `json:"user,omitempty"` // user[:group], names or numbers
	WorkDir    string            `json:"work_dir,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Volumes    []string          `json:"volumes,omitempty"` // sorted
}

// LayerFiles are a layer's blobs as files. Data is empty if there is no data blob.
type LayerFiles struct {
	Meta string
	Data string
}
