"""Part: data modules that read files: tables, images, Arrow, shards, datasets of Hugging Face, MNIST."""
