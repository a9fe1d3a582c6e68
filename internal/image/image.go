package image

// Kinds of layer that a sandbox composes.
const (
	KindBase      = "base"
	KindWorkspace = "workspace"
	KindToolkit   = "toolkit"
)

// Image describes a stored image. Names are not part of it: the catalogue has them.
type Image struct {
	Digest        string   `json:"digest"` // "sha256:…" over what the image is: not the time, nor where it is
	CreatedUnixMS int64    `json:"created_unix_ms"`
	SizeBytes     int64    `json:"size_bytes"` // on disk, all layers
	Files         int64    `json:"files"`      // entries, all layers
	Layers        []Layer  `json:"layers"`     // lowest first
	Config        Config   `json:"config"`
	Notes         []string `json:"notes,omitempty"` // what the import left out, and why
}

// Layer is one read-only layer: a metadata blob and, unless everything fits in
// it, a data blob. Digests are hex SHA-256.
type Layer struct {
	Kind       string `json:"kind"`
	MetaDigest string `json:"meta_digest"`
	MetaSize   int64  `json:"meta_size"`
	DataDigest string `json:"data_digest,omitempty"`
	DataSize   int64  `json:"data_size,omitempty"`
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
