// What the views of the console share.

export const state = {
  models: [], // as /v1/models lists them
  items: [], // {file, url, name, video, frames, width, height, asked, answers, corrections, teacher, failed}
  current: 0, // place of the file that is shown
  running: null, // AbortController of the running requests
  hidden: new Set(), // names in the legend that are switched off
};

export const shownItem = () => state.items[state.current];
