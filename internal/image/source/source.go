package source

const phase = "image.source"
